"""Who computes which samples: shares of the data-parallel ranks, and packed micro-batches.

Everything here is a function of integers and the same on every rank.
"""

import heapq
from collections.abc import Sequence

EVEN_ENOUGH_PER_MILLE = 5
"""How far the largest part may be above the mean before a slower way is tried."""


def balanced_partition(costs: Sequence[int], *, num_parts: int) -> list[list[int]]:
    """Divide the items into `num_parts` lists of indices whose sums of cost are about equal.

    The largest sum is at most 4/3 - 1/(3 * num_parts) of the best possible (`_longest_first`); with
    few items for each part it is often nearer by `_largest_differencing`. Parts are empty only
    where there are fewer items than parts; indices ascend within a part.
    """

    def largest(parts: list[list[int]]) -> int:
        return max(sum(costs[i] for i in part) for part in parts)

    parts = _longest_first(costs, num_parts=num_parts)
    if 1000 * num_parts * largest(parts) > (1000 + EVEN_ENOUGH_PER_MILLE) * sum(costs):
        others = _largest_differencing(costs, num_parts=num_parts)
        if all(others) and largest(others) < largest(parts):
            parts = others
    return [sorted(part) for part in parts]


def _longest_first(costs: Sequence[int], *, num_parts: int) -> list[list[int]]:
    """Each item to the part with the least so far (Graham 1969)."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, 0, part) for part in range(num_parts)]  # (cost, items, part)
    for index in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        cost, size, part = heapq.heappop(heap)
        parts[part].append(index)
        heapq.heappush(heap, (cost + costs[index], size + 1, part))
    return parts


def _largest_differencing(costs: Sequence[int], *, num_parts: int) -> list[list[int]]:
    """Join the two partial divisions whose parts differ most, the largest part of one with the
    smallest of the other, until one is left (Karmarkar and Karp 1982, for several parts).

    Takes len(costs) * num_parts steps of Python: milliseconds for hundreds of items.
    """
    # (-difference, number, [(sum, items)] with the largest first); numbers settle ties.
    heap = [
        (-cost, index, [(cost, [index]), *[(0, list[int]())] * (num_parts - 1)])
        for index, cost in enumerate(costs)
    ]
    heapq.heapify(heap)
    number = len(costs)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [items for _, items in heap[0][2]]


def pack(
    lengths: Sequence[int], *, micro_batch_tokens: int, micro_batch_samples: int = 0
) -> list[list[int]]:
    """Pack sequences into few micro-batches of about equal tokens, none above the token budget.

    `lengths` are tokens, prompts included; their sum stays within `micro_batch_tokens`. A sequence
    longer than that is alone in its micro-batch. `micro_batch_samples` bounds the sequences of one;
    0 sets no bound. There are no more micro-batches than first-fit decreasing needs. They come in
    the order of their longest sequence, longest first; indices ascend within one.
    """
    return _Packing(lengths, tokens=micro_batch_tokens, samples=micro_batch_samples).fewest()


def pack_for_ranks(
    lengths_by_rank: Sequence[Sequence[int]],
    *,
    micro_batch_tokens: int,
    micro_batch_samples: int = 0,
    number_multiple: int = 1,
) -> list[list[list[int]]]:
    """`pack` for each data-parallel rank, all with the same number of micro-batches.

    Every rank must enter the collectives of every micro-batch, so all take as many as the rank that
    needs most, raised to a multiple of `number_multiple`, and spread their sequences over these.
    Micro-batches without sequences come last. Result: [rank][micro-batch] -> indices into that
    rank's lengths.
    """
    packings = [
        _Packing(lengths, tokens=micro_batch_tokens, samples=micro_batch_samples)
        for lengths in lengths_by_rank
    ]
    fewest = [packing.fewest() for packing in packings]
    number = max((len(packs) for packs in fewest), default=0)
    number += -number % number_multiple
    return [
        packs if len(packs) == number else packing.spread(packs, number=number)
        for packing, packs in zip(packings, fewest, strict=True)
    ]


class _Packing:
    """Sequences to be packed, longest first; those above the budget are alone."""

    def __init__(self, lengths: Sequence[int], *, tokens: int, samples: int) -> None:
        """samples: 0 sets no bound."""
        self._lengths, self._tokens = lengths, tokens
        self._samples = samples or len(lengths)
        order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
        self._alone = [index for index in order if lengths[index] > tokens]
        self._others = order[len(self._alone) :]

    def fewest(self) -> list[list[int]]:
        """As even as can be with no more micro-batches than first-fit decreasing needs."""
        packs = self._even(self._lower_bound())
        if packs is None:
            # Too little of the budget is left over to be even, or no packing is that small.
            tight = self._first_fit_decreasing()
            packs = self._even(len(tight)) or [sorted(members) for members in tight]
        return packs

    def spread(self, packs: list[list[int]], *, number: int) -> list[list[int]]:
        """`packs` over a larger number of micro-batches."""
        return self._even(number) or packs + [[] for _ in range(number - len(packs))]

    def _lower_bound(self) -> int:
        """No packing has fewer micro-batches."""
        if not self._others:
            return len(self._alone)
        by_tokens = -(-sum(self._lengths[i] for i in self._others) // self._tokens)
        by_samples = -(-len(self._others) // self._samples)
        return len(self._alone) + max(by_tokens, by_samples)

    def _even(self, number: int) -> list[list[int]] | None:
        """Each to the micro-batch with the fewest tokens so far; None where that goes beyond a
        bound."""
        packs = [[index] for index in self._alone]
        packs += [[] for _ in range(number - len(self._alone))]
        heap = [(0, 0, pack) for pack in range(len(self._alone), number)]  # (tokens, samples, pack)
        for index in self._others:
            if not heap or heap[0][0] + self._lengths[index] > self._tokens:
                return None
            tokens, samples, pack = heapq.heappop(heap)
            packs[pack].append(index)
            if samples + 1 < self._samples:
                heapq.heappush(heap, (tokens + self._lengths[index], samples + 1, pack))
        return [sorted(members) for members in packs]

    def _first_fit_decreasing(self) -> list[list[int]]:
        packs: list[list[int]] = []
        room: list[int] = []
        for index in self._others:
            for number, left in enumerate(room):
                if self._lengths[index] <= left and len(packs[number]) < self._samples:
                    break
            else:
                number = len(packs)
                packs.append([])
                room.append(self._tokens)
            packs[number].append(index)
            room[number] -= self._lengths[index]
        return [[index] for index in self._alone] + packs
