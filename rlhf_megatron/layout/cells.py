"""Boxes of one tensor cut along each other's borders, and the coverage check built on it."""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise, product
from math import prod

from rlhf_megatron.layout.boxes import Box, RankLayout


def cells(boxes: Sequence[Box]) -> dict[Box, list[int]]:
    """Disjoint boxes whose union is that of `boxes`: each cell, and the indices of the boxes that
    contain it.

    Boxes that share no interior and no border line inside each other stay whole.
    """
    if not boxes:
        return {}
    dimensions = range(len(boxes[0].start))
    lines = [sorted({b.start[d] for b in boxes} | {b.stop[d] for b in boxes}) for d in dimensions]
    found: dict[Box, list[int]] = {}
    for index, box in enumerate(boxes):
        spans = []
        for d in dimensions:
            first = bisect_left(lines[d], box.start[d])
            last = bisect_left(lines[d], box.stop[d])
            spans.append(list(pairwise(lines[d][first : last + 1])))
        for span in product(*spans):
            cell = Box(tuple(a for a, _ in span), tuple(b for _, b in span))
            found.setdefault(cell, []).append(index)
    return found


def cut_rows(box: Box, *, elements: int) -> list[Box]:
    """The box in parts of at most `elements` along dimension 0; at least one row each."""
    if box.numel <= elements:
        return [box]
    rows = max(1, elements // prod(box.shape[1:]))
    bounds = [*range(box.start[0], box.stop[0], rows), box.stop[0]]
    return [Box((a, *box.start[1:]), (b, *box.stop[1:])) for a, b in pairwise(bounds)]


def coverage_problems(
    layout: RankLayout,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    padded_parameters: Collection[str],
) -> list[str]:
    """Which elements of a rank's parameters no box covers, or more than one; empty where none.

    `shapes`: every parameter of the rank. The last rows of a parameter in `padded_parameters` may
    be uncovered: vocabulary padding.
    """
    regions: dict[str, list[Box]] = {name: [] for name in shapes}
    problems = []
    for placement in layout:
        stop = tuple(o + n for o, n in zip(placement.offset, placement.box.shape, strict=True))
        if placement.parameter not in shapes:
            problems.append(f"{placement.parameter}: in the layout, but not a parameter")
        else:
            regions[placement.parameter].append(Box(placement.offset, stop))
    for name, boxes in regions.items():
        problems += _parameter_problems(
            name, boxes=boxes, shape=shapes[name], padded=name in padded_parameters
        )
    return problems


def _parameter_problems(
    name: str, *, boxes: list[Box], shape: tuple[int, ...], padded: bool
) -> list[str]:
    problems = []
    if any(len(b.stop) != len(shape) for b in boxes) or any(
        stop > size for b in boxes for stop, size in zip(b.stop, shape, strict=False)
    ):
        return [f"{name}: boxes reach beyond its shape {shape}"]
    grid = cells(boxes)
    twice = sum(cell.numel for cell, owners in grid.items() if len(owners) > 1)
    if twice:
        problems.append(f"{name}: {twice} elements are covered more than once")
    covered = sum(cell.numel for cell in grid)
    wanted = prod(shape)
    if padded:
        wanted = max((b.stop[0] for b in boxes), default=0) * prod(shape[1:])
    if covered != wanted:
        problems.append(f"{name}: {wanted - covered} of {prod(shape)} elements are not covered")
    return problems
