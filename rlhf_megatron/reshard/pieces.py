"""The pieces that move between two layouts: who holds each, who wants it. Integers only.

Ranks with the same layout (data-parallel replicas, the k-th ranks of all engines) form a class, and
all work is done per class, so that its cost does not grow with the number of replicas.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
        holders = _holders(held.get(tensor, []))
        parts: dict[Box, list[tuple[Box, tuple[Owner, ...]]]] = {}
        for taker in wanted[tensor]:
            box = taker.placement.box
            if box not in parts:
                common = ((box.intersect(cell), owners) for cell, owners in holders.items())
                parts[box] = [(part, owners) for part, owners in common if part is not None]
                if sum(part.numel for part, _ in parts[box]) != box.numel:
                    missing.append(f"{tensor} {box}")
            for part, owners in parts[box]:
                yield Piece(tensor, part, owners, taker)
    assert not missing, f"no source rank holds all of: {missing}"


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
    """The wanted tensors, those of each first holder in turn."""
    queues: dict[int, list[str]] = {}
    for tensor in wanted:
        first = min((owner.ranks.ranks[0] for owner in held.get(tensor, [])), default=-1)
        queues.setdefault(first, []).append(tensor)
    turns = chain.from_iterable(zip_longest(*(queues[first] for first in sorted(queues))))
    return (tensor for tensor in turns if tensor is not None)


def _holders(owners: list[Owner]) -> dict[Box, tuple[Owner, ...]]:
    """Disjoint cells of a source tensor, in order, and who holds each. Where a rank holds a cell
    twice (a tied copy), the first counts."""
    grid = cells([owner.placement.box for owner in owners])
    found: dict[Box, tuple[Owner, ...]] = {}
    for cell in sorted(grid, key=lambda box: box.start):
        once: dict[RankClass, Owner] = {}
        for index in grid[cell]:
            once.setdefault(owners[index].ranks, owners[index])
        found[cell] = tuple(once.values())
    return found
