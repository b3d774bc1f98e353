"""Who computes which samples: shares of the data-parallel ranks, and packed micro-batches.

Everything here is a function of integers and the same on every rank.
"""

import heapq
from collections.abc import Sequence


def balanced_partition(costs: Sequence[int], *, num_parts: int) -> list[list[int]]:
    """Divide the items into `num_parts` lists of indices whose sums of cost are about equal.

    Longest item first, each to the part with the least so far: the largest sum is at most
    4/3 - 1/(3 * num_parts) of the best possible (Graham 1969). Parts are empty only where there are
    fewer items than parts; indices ascend within a part.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, 0, part) for part in range(num_parts)]  # (cost, items, part)
    for index in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        cost, size, part = heapq.heappop(heap)
        parts[part].append(index)
        heapq.heappush(heap, (cost + costs[index], size + 1, part))
    return [sorted(part) for part in parts]


def pack(
    lengths: Sequence[int], *, micro_batch_tokens: int, micro_batch_samples: int = 0
) -> list[list[int]]:
    """Pack sequences into micro-batches under a token budget, first-fit decreasing.

    `lengths` are tokens, prompts included; their sum stays within `micro_batch_tokens`. A sequence
    longer than that is alone in its micro-batch. `micro_batch_samples` bounds the sequences of one;
    0 sets no bound. Micro-batches come in the order of their longest sequence, longest first;
    indices ascend within one.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        for number, left in enumerate(room):
            full = micro_batch_samples and len(packs[number]) >= micro_batch_samples
            if lengths[index] <= left and not full:
                break
        else:
            number = len(packs)
            packs.append([])
            room.append(micro_batch_tokens)
        packs[number].append(index)
        room[number] -= lengths[index]
    return [sorted(members) for members in packs]


def pack_for_ranks(
    lengths_by_rank: Sequence[Sequence[int]],
    *,
    micro_batch_tokens: int,
    micro_batch_samples: int = 0,
) -> list[list[list[int]]]:
    """`pack` for each data-parallel rank, all with the same number of micro-batches.

    Ranks that need fewer get empty ones at the end, since every rank must enter the collectives of
    every micro-batch. Result: [rank][micro-batch] -> indices into that rank's lengths.
    """
    packed = [
        pack(
            lengths,
            micro_batch_tokens=micro_batch_tokens,
            micro_batch_samples=micro_batch_samples,
        )
        for lengths in lengths_by_rank
    ]
    most = max((len(packs) for packs in packed), default=0)
    return [packs + [[] for _ in range(most - len(packs))] for packs in packed]
