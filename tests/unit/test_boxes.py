"""Box arithmetic against marked arrays."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.layout.boxes import Box, Placement
from rlhf_megatron.layout.cells import cells, cut_rows

SHAPE = (7, 5)


@st.composite
def boxes(draw):
    start = tuple(draw(st.integers(0, size - 1)) for size in SHAPE)
    stop = tuple(draw(st.integers(a + 1, size)) for a, size in zip(start, SHAPE, strict=True))
    return Box(start, stop)


def mark(box: Box) -> np.ndarray:
    array = np.zeros(SHAPE, dtype=bool)
    array[box.slices()] = True
    return array


@given(boxes(), boxes())
def test_intersection_is_that_of_the_elements(a, b):
    common = a.intersect(b)
    expected = mark(a) & mark(b)
    if common is None:
        assert not expected.any()
    else:
        np.testing.assert_array_equal(mark(common), expected)
        assert common.numel == expected.sum()


@settings(max_examples=60)
@given(st.lists(boxes(), min_size=1, max_size=5))
def test_cells_are_disjoint_and_know_who_contains_them(found):
    count = np.zeros(SHAPE, dtype=int)
    for cell, owners in cells(found).items():
        count[cell.slices()] += 1
        inside = [i for i, box in enumerate(found) if (mark(box) & mark(cell)).any()]
        assert owners == inside
        assert all(mark(found[i])[cell.slices()].all() for i in owners)
    expected = np.zeros(SHAPE, dtype=bool)
    for box in found:
        expected |= mark(box)
    np.testing.assert_array_equal(count, expected.astype(int))


def test_cells_of_equal_parts_stay_whole():
    parts = [Box((a, 0), (a + 2, 3)) for a in (0, 2, 4)]
    assert list(cells([*parts, parts[0]])) == parts
    assert cells([]) == {}


@given(boxes(), st.integers(1, 40))
def test_cut_rows_is_a_partition_into_small_parts(box, elements):
    parts = cut_rows(box, elements=elements)
    count = sum(mark(part).astype(int) for part in parts)
    np.testing.assert_array_equal(count, mark(box).astype(int))
    assert all(part.numel <= elements or part.shape[0] == 1 for part in parts)


@given(boxes(), boxes(), st.integers(0, 3), st.integers(0, 3))
def test_region_finds_a_part_inside_the_parameter(box, other, row, column):
    part = box.intersect(other)
    if part is None:
        return
    logical = np.arange(35).reshape(SHAPE)
    parameter = np.full((12, 12), -1)
    placement = Placement("t", box, "p", (row, column))
    parameter[placement.region(box)] = logical[box.slices()]
    np.testing.assert_array_equal(parameter[placement.region(part)], logical[part.slices()])
