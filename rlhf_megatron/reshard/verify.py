"""Proof that two layouts hold the same weights: fingerprints of every piece, compared exactly."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.layout.boxes import Box, Placement
from rlhf_megatron.layout.cells import cut_rows
from rlhf_megatron.reshard.pieces import Layouts, Piece, pieces

_CHUNK_ELEMENTS = 1 << 22
"""Elements fingerprinted at once: bounds the temporary memory to about 100 MB."""

_BIT_TYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687
"""Odd 64-bit constants that spread an index over all bits."""


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What a successful comparison looked at."""

    num_tensors: int
    num_pieces: int
    seconds: float


@torch.no_grad()
def verify_reshard(
    source_layouts: Layouts,
    target_layouts: Layouts,
    *,
    rank: int,
    group: dist.ProcessGroup,
    source: Mapping[str, Tensor],
    target: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
) -> VerifyReport:
    """Compare both sides piece by piece, as `dtype` bit patterns. Collective over `group`.

    `shapes`: the full shape of each logical tensor. The lowest rank that holds a piece sets its
    fingerprint; every other holder and every target rank must have the same, so stale replicas are
    found too. Raises RuntimeError on all ranks, naming tensors and ranks.
    """
    start = time.perf_counter()
    own: list[tuple[int, str, Tensor, str]] = []
    expected: list[Tensor] = []
    names: set[str] = set()
    zero = torch.zeros((), dtype=torch.int64, device=device)
    for number, piece in enumerate(pieces(source_layouts, target_layouts)):
        names.add(piece.tensor)
        expected.append(zero)
        for side, placement in _places(piece, rank=rank):
            tensors = source if side == "source" else target
            value = tensors[placement.parameter][placement.region(piece.box)]
            found = fingerprint(value, box=piece.box, shape=shapes[piece.tensor], dtype=dtype)
            own.append((number, piece.tensor, found.to(device), side))
            if side == "source" and rank == piece.holders[0].ranks.ranks[0]:
                expected[-1] = own[-1][2]
    reference = torch.stack(expected) if expected else zero.reshape(1)
    dist.all_reduce(reference, group=group)
    wrong = _differences(own, reference=reference)
    _raise_if_any(wrong, rank=rank, group=group)
    return VerifyReport(
        num_tensors=len(names), num_pieces=len(expected), seconds=time.perf_counter() - start
    )


def fingerprint(value: Tensor, *, box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Position-sensitive sum of the bit patterns of `value`, which is `box` of a tensor of `shape`.

    A scalar int64, modulo 2^64: sum over elements of bits * weight(index in the whole tensor). The
    fingerprints of disjoint boxes add up. Weights are odd, so a single changed element always
    shows.
    """
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for part in cut_rows(box, elements=_CHUNK_ELEMENTS):
        chunk = value[part.slices(origin=box.start)].to(dtype).contiguous()
        bits = chunk.view(_BIT_TYPES[dtype.itemsize]).to(torch.int64)
        weight = torch.zeros((), dtype=torch.int64, device=value.device)
        for start, stop, size in zip(part.start, part.stop, shape, strict=True):
            along = torch.arange(start, stop, dtype=torch.int64, device=value.device)
            weight = weight.unsqueeze(-1) * size + along
        weight = weight * _MIX_1
        weight = ((weight ^ (weight >> 32)) * _MIX_2) | 1
        total += (bits * weight).sum()
    return total


def _places(piece: Piece, *, rank: int) -> Iterator[tuple[str, Placement]]:
    """Where this rank has the piece, on either side."""
    for owner in piece.holders:
        if rank in owner.ranks.members:
            yield "source", owner.placement
    if rank in piece.taker.ranks.members:
        yield "target", piece.taker.placement


def _differences(
    own: list[tuple[int, str, Tensor, str]], *, reference: Tensor
) -> list[tuple[str, str]]:
    """(tensor, side) of each piece of this rank that differs from its reference."""
    if not own:
        return []
    numbers = torch.tensor([number for number, *_ in own], device=reference.device)
    differs = torch.stack([found for _, _, found, _ in own]) != reference[numbers]
    return sorted(
        {
            (tensor, side)
            for (_, tensor, _, side), bad in zip(own, differs.tolist(), strict=True)
            if bad
        }
    )


def _raise_if_any(wrong: list[tuple[str, str]], *, rank: int, group: dist.ProcessGroup) -> None:
    gathered: list[tuple[int, list[tuple[str, str]]]] = [(0, [])] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (rank, wrong), group=group)
    found: dict[tuple[str, str], list[int]] = {}
    for other, pairs in gathered:
        for pair in pairs:
            found.setdefault(pair, []).append(other)
    if not found:
        return
    lines = [
        f"  - {tensor}: the {side} side of rank {', '.join(map(str, sorted(ranks)))} differs"
        for (tensor, side), ranks in sorted(found.items())
    ]
    shown = lines[:20] + ([f"  - and {len(lines) - 20} more"] if len(lines) > 20 else [])
    raise RuntimeError(
        "reshard: the weights of the two layouts differ (a rank with stale or damaged weights, or"
        " a fault in the plan)\n" + "\n".join(shown)
    )
