"""The pieces that move between two layouts: who holds each, who wants it. Integers only.

Ranks with the same layout (data-parallel replicas, the k-th ranks of all engines) form a class, and
all work is done per class, so that its cost does not grow with the number of replicas.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, zip_longest

from rlhf_megatron.layout.boxes import Box, Placement, RankLayout
from rlhf_megatron.layout.cells import cells

Layouts = Mapping[int, RankLayout]
"""A layout per global rank. Ranks with the same layout should share one object, and must do so
alike on all ranks that plan."""


@dataclass(frozen=True, eq=False, slots=True)
class RankClass:
    """Ranks that share a layout, ascending. Compared by identity."""

    ranks: tuple[int, ...]
    members: frozenset[int]


@dataclass(frozen=True, slots=True)
class Owner:
    """A class of ranks, and where each of them has a tensor's box."""

    placement: Placement
    ranks: RankClass


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that lies whole in one box of each holder and of the takers."""

    tensor: str
    box: Box
    holders: tuple[Owner, ...]
    """Source classes, by their first rank."""
    taker: Owner
    """The target class that wants it."""


def pieces(source: Layouts, target: Layouts) -> Iterator[Piece]:
    """Every piece, in an order that depends on the layouts alone.

    Tensors of different pipeline stages take turns, so that all stages send at the same time.
    Asserts that the source holds every element that the target wants.
    """
    held, wanted = _by_tensor(source), _by_tensor(target)
    missing = []
    for tensor in _take_turns(held, wanted):
        owners, takers = held.get(tensor, []), wanted[tensor]
        common = _overlaps(
            tuple(owner.placement.box for owner in owners),
            tuple(taker.placement.box for taker in takers),
        )
        for taker, parts in zip(takers, common, strict=True):
            box = taker.placement.box
            if sum(part.numel for part, _ in parts) != box.numel:
                missing.append(f"{tensor} {box}")
            for part, holders in parts:
                yield Piece(tensor, part, _once(owners[index] for index in holders), taker)
    assert not missing, f"no source rank holds all of: {missing}"


@lru_cache(maxsize=256)
def _overlaps(
    held: tuple[Box, ...], wanted: tuple[Box, ...]
) -> list[list[tuple[Box, tuple[int, ...]]]]:
    """For each wanted box the disjoint cells of the held ones in it, in order, and the indices of
    the held boxes around each. Cached, since tensors of the same kind are cut alike in all layers.
    """
    grid = sorted(cells(held).items(), key=lambda item: item[0].start)
    known: dict[Box, list[tuple[Box, tuple[int, ...]]]] = {}
    for box in wanted:
        if box not in known:
            common = ((box.intersect(cell), tuple(holders)) for cell, holders in grid)
            known[box] = [(part, holders) for part, holders in common if part is not None]
    return [known[box] for box in wanted]


def _by_tensor(layouts: Layouts) -> dict[str, list[Owner]]:
    """Per tensor, its owners in the order of their first ranks."""
    shared: dict[int, list[int]] = {}
    for rank in sorted(layouts):
        shared.setdefault(id(layouts[rank]), []).append(rank)
    found: dict[str, list[Owner]] = {}
    for ranks in shared.values():
        members = RankClass(tuple(ranks), frozenset(ranks))
        for placement in layouts[ranks[0]]:
            found.setdefault(placement.tensor, []).append(Owner(placement, members))
    return found


def _take_turns(
    held: Mapping[str, list[Owner]], wanted: Mapping[str, list[Owner]]
) -> Iterator[str]:
    """The wanted tensors, those of each first holder in turn, large ones first: small ones then
    fill the gaps that these leave in the buckets."""
    queues: dict[int, list[str]] = {}
    for tensor in wanted:
        first = min((owner.ranks.ranks[0] for owner in held.get(tensor, [])), default=-1)
        queues.setdefault(first, []).append(tensor)
    for queue in queues.values():
        queue.sort(key=lambda tensor: -sum(owner.placement.box.numel for owner in wanted[tensor]))
    turns = chain.from_iterable(zip_longest(*(queues[first] for first in sorted(queues))))
    return (tensor for tensor in turns if tensor is not None)


def _once(owners: Iterable[Owner]) -> tuple[Owner, ...]:
    """Where a rank holds a cell twice (a tied copy), the first counts."""
    found: dict[RankClass, Owner] = {}
    for owner in owners:
        found.setdefault(owner.ranks, owner)
    return tuple(found.values())
