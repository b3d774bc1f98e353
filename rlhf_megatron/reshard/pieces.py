"""The pieces that move between two layouts: who holds each, who wants it. Integers only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, zip_longest

from rlhf_megatron.layout.boxes import Box, Placement, RankLayout
from rlhf_megatron.layout.cells import cells

Layouts = Mapping[int, RankLayout]
"""A layout per global rank. Ranks with the same layout should share one object: this is fast."""

_Entries = dict[str, list[tuple[Placement, tuple[int, ...]]]]
"""Per tensor: a placement, and the ranks that have it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor that lies whole in one box of each holder and each taker."""

    tensor: str
    box: Box
    holders: Mapping[int, Placement]
    """Source ranks, ascending, and where they have it."""
    wanted: tuple[tuple[int, Placement], ...]
    """Target ranks, ascending, and where it goes."""


def pieces(source: Layouts, target: Layouts) -> Iterator[Piece]:
    """Every piece, in an order that depends on the layouts alone.

    Tensors of different pipeline stages take turns, so that all stages send at the same time.
    Asserts that the source holds every element that the target wants.
    """
    held, wanted = _by_tensor(source), _by_tensor(target)
    missing = []
    for tensor in _take_turns(held, wanted):
        holders = _holders(held.get(tensor, []))
        for box, takers in _takers(wanted[tensor]).items():
            found = 0
            for cell, ranks in holders.items():
                part = box.intersect(cell)
                if part is not None:
                    found += part.numel
                    yield Piece(tensor, part, ranks, takers)
            if found != box.numel:
                missing.append(f"{tensor} {box}")
    assert not missing, f"no source rank holds all of: {missing}"


def _by_tensor(layouts: Layouts) -> _Entries:
    classes: dict[int, tuple[RankLayout, list[int]]] = {}
    for rank in sorted(layouts):
        layout = layouts[rank]
        classes.setdefault(id(layout), (layout, []))[1].append(rank)
    found: _Entries = {}
    for layout, members in classes.values():
        ranks = tuple(members)
        for placement in layout:
            found.setdefault(placement.tensor, []).append((placement, ranks))
    return found


def _take_turns(held: _Entries, wanted: _Entries) -> Iterator[str]:
    """The wanted tensors, those of each set of first holders in turn."""
    queues: dict[int, list[str]] = {}
    for tensor in wanted:
        first = min((ranks[0] for _, ranks in held.get(tensor, [])), default=-1)
        queues.setdefault(first, []).append(tensor)
    turns = chain.from_iterable(zip_longest(*(queues[first] for first in sorted(queues))))
    return (tensor for tensor in turns if tensor is not None)


def _holders(entries: list[tuple[Placement, tuple[int, ...]]]) -> dict[Box, dict[int, Placement]]:
    """Disjoint cells of a source tensor, in order, and who holds each. Where a rank holds a cell
    twice (a tied copy), the first counts."""
    grid = cells([placement.box for placement, _ in entries])
    found: dict[Box, dict[int, Placement]] = {}
    for cell in sorted(grid, key=lambda box: box.start):
        ranks: dict[int, Placement] = {}
        for index in grid[cell]:
            placement, members = entries[index]
            for rank in members:
                ranks.setdefault(rank, placement)
        found[cell] = dict(sorted(ranks.items()))
    return found


def _takers(
    entries: list[tuple[Placement, tuple[int, ...]]],
) -> dict[Box, tuple[tuple[int, Placement], ...]]:
    """The distinct target boxes, in order, and who wants each where."""
    found: dict[Box, list[tuple[int, Placement]]] = {}
    for placement, ranks in entries:
        found.setdefault(placement.box, []).extend((rank, placement) for rank in ranks)
    return {
        box: tuple(sorted(found[box], key=lambda taker: taker[0]))
        for box in sorted(found, key=lambda box: (box.start, box.stop))
    }
