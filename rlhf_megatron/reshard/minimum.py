"""The least bytes that a sync can receive, from the layouts alone: no plan is looked at."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import gcd

import numpy as np
from numpy.typing import NDArray

from rlhf_megatron.layout.boxes import Box, RankLayout
from rlhf_megatron.layout.cells import cells
from rlhf_megatron.reshard.pieces import Layouts

_LARGEST_ASSIGNMENT = 1024
"""Rows. Solving it takes a second or two at this size, and grows with the cube."""


def bytes_minimum(
    source: Layouts, target: Layouts, *, itemsize_bytes: int, away: "Away | None" = None
) -> dict[int, int]:
    """Per target rank, the bytes of its boxes that it does not hold itself.

    No plan can receive fewer with this assignment of shards to ranks, and none needs more.
    """
    away = away or Away()
    return {
        rank: away.elements(source.get(rank, ()), wanted=wanted) * itemsize_bytes
        for rank, wanted in target.items()
    }


class Away:
    """Elements of one layout that another lacks. Remembers answers by layout object, so that
    ranks which share one are computed once; the layouts must outlive it."""

    def __init__(self) -> None:
        self._boxes: dict[int, dict[str, list[Box]]] = {}
        self._sizes: dict[int, int] = {}
        self._known: dict[tuple[int, int], int] = {}

    def elements(self, held: RankLayout, *, wanted: RankLayout) -> int:
        key = (id(held), id(wanted))
        if key not in self._known:
            common = _in_common(self._boxes_of(held), wanted=self._boxes_of(wanted))
            self._known[key] = self._size_of(wanted) - common
        return self._known[key]

    def _boxes_of(self, layout: RankLayout) -> dict[str, list[Box]]:
        if id(layout) not in self._boxes:
            found: dict[str, list[Box]] = {}
            for placement in layout:
                found.setdefault(placement.tensor, []).append(placement.box)
            self._boxes[id(layout)] = found
        return self._boxes[id(layout)]

    def _size_of(self, layout: RankLayout) -> int:
        if id(layout) not in self._sizes:
            self._sizes[id(layout)] = sum(placement.box.numel for placement in layout)
        return self._sizes[id(layout)]


def _in_common(held: Mapping[str, list[Box]], *, wanted: Mapping[str, list[Box]]) -> int:
    """Elements of the wanted boxes that lie in held ones, which may overlap."""
    total = 0
    for tensor, own in held.items():
        disjoint = list(cells(own)) if len(own) > 1 else own
        common = (box.intersect(other) for box in wanted.get(tensor, ()) for other in disjoint)
        total += sum(box.numel for box in common if box is not None)
    return total


def elements_minimum_over_numberings(
    source: Layouts,
    *,
    shards: Sequence[RankLayout],
    ranks: Iterable[int],
    node_of: Callable[[int], int],
    away: Away,
) -> int | None:
    """The least elements received in all over every way to deal the shards out to the ranks, each
    shard as often as any other within each node.

    Rank order does not count here, though an engine is an ascending list of ranks: engines may
    need more. None where the problem is too large. The ranks of a node must fill whole engines.
    """
    nodes: dict[int, list[RankLayout]] = {}
    for rank in ranks:
        nodes.setdefault(node_of(rank), []).append(source.get(rank, ()))
    by_id = {id(held): held for layouts in nodes.values() for held in layouts}
    alike = Counter(tuple(sorted(Counter(map(id, layouts)).items())) for layouts in nodes.values())
    total = 0
    for counts, times in alike.items():
        each = sum(count for _, count in counts) // len(shards)
        common = gcd(each, *(count for _, count in counts))
        held = [by_id[key] for key, count in counts for _ in range(count // common)]
        if len(held) > _LARGEST_ASSIGNMENT:
            return None
        columns = [shard for shard in shards for _ in range(each // common)]
        costs = np.array([[away.elements(own, wanted=shard) for shard in columns] for own in held])
        total += _least_cost(costs) * common * times
    return total


def _least_cost(costs: NDArray[np.int64]) -> int:
    """The least sum of n entries of an [n, n] matrix, one in each row and column: the Hungarian
    method, a shortest augmenting path for each row."""
    size = len(costs)
    unreached = np.iinfo(np.int64).max // 4
    row_prices = np.zeros(size + 1, dtype=np.int64)
    prices = np.zeros(size + 1, dtype=np.int64)
    row_of = np.full(size + 1, -1)  # the row of each column; the last column starts the paths
    for row in range(size):
        row_of[size] = row
        column = size
        slack = np.full(size + 1, unreached)
        before = np.full(size + 1, size)
        done = np.zeros(size + 1, dtype=bool)
        while row_of[column] >= 0:
            done[column] = True
            at = row_of[column]
            reduced = costs[at] - row_prices[at] - prices[:size]
            better = ~done[:size] & (reduced < slack[:size])
            slack[:size][better] = reduced[better]
            before[:size][better] = column
            open_slack = np.where(done, unreached, slack)
            open_slack[size] = unreached
            nearest = int(open_slack.argmin())
            step = open_slack[nearest]
            row_prices[row_of[done]] += step
            prices[done] -= step
            slack[~done] -= step
            column = nearest
        while column != size:
            row_of[column] = row_of[before[column]]
            column = before[column]
    return int(costs[row_of[:size], np.arange(size)].sum())
