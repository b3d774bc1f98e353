"""Who sends to whom, and in which bucket: the planner's two decisions. Integers only.

NumPy arrays over the senders of a piece: with thousands of ranks, a Python loop over them would
take most of the planner's time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlhf_megatron.reshard.pieces import Piece, RankClass

Integers = NDArray[np.int64]


@dataclass(eq=False)
class Route:
    """Takers that choose among the same senders."""

    senders: tuple[int, ...]
    takers: tuple[int, ...]
    crosses_nodes: bool

    def __post_init__(self) -> None:
        each, more = divmod(len(self.takers), len(self.senders))
        self.sends = np.array([each + (k < more) for k in range(len(self.senders))])
        """How many takers the k-th sender serves, in the order in which they are chosen."""


class Delivery:
    """How a class of takers gets what a set of holders has."""

    def __init__(
        self,
        *,
        local: frozenset[int],
        routes: Sequence[Route],
        listed: frozenset[int],
        taker_rows: Sequence[int],
    ) -> None:
        self.local = local
        """Takers that hold it themselves, of the listed ranks."""
        self.routes = tuple(routes)
        self.bytes_per_taker = 0
        """Sent so far to each taker that does not hold it itself."""
        self.listed = [route for route in routes if listed & {*route.senders, *route.takers}]
        """Routes with a rank whose transfers are listed."""
        ranks = sorted({rank for route in routes for rank in route.senders})
        self.rows: Integers = np.array([*ranks, *taker_rows], dtype=np.int64)
        """The senders of all routes, ascending, and the rows that stand for the takers."""
        self.fixed_loads: Integers = np.zeros(len(self.rows), dtype=np.int64)
        """How often each of `rows` sends a piece where there is no choice, or receives it."""
        self.fixed_loads[len(ranks) :] = 1
        self.free: list[tuple[Route, Integers]] = []
        """Routes with a choice, and where their senders stand in `rows`."""
        for route in routes:
            positions = np.searchsorted(self.rows, route.senders)
            if len(route.senders) > 1:
                self.free.append((route, positions))
            else:
                self.fixed_loads[positions] += route.sends

    @cached_property
    def sends_per_sender(self) -> int:
        """No sender sends a piece more often. (A sender may serve its own node and others.)"""
        times = [-(-len(route.takers) // len(route.senders)) for route in self.routes]
        far = [n for n, route in zip(times, self.routes, strict=True) if route.crosses_nodes]
        return max(times) if len(far) == len(times) else max(times) + sum(far)


@dataclass(frozen=True)
class Choice:
    """Who sends one piece."""

    rows: Integers
    """The senders, then the rows of the takers."""
    times: Integers
    """How often each sends it; then 1, since each taker receives it once."""
    orders: dict[Route, Integers]
    """Per route with a choice: its senders in the order in which the takers, in turn, use them."""

    def of(self, route: Route) -> Sequence[int]:
        return self.orders[route].tolist() if route in self.orders else route.senders


class Routes:
    """Finds routes, once for each pair of holders and takers, and keeps count of the bytes."""

    def __init__(
        self,
        everyone: Sequence[int],
        *,
        node_of: Callable[[int], int],
        listed: frozenset[int],
        alike: Mapping[int, int],
    ) -> None:
        """alike: per rank, the first of the ranks that hold and take the same as it."""
        self._listed, self._alike = listed, alike
        self._num_ranks = max(everyone, default=0) + 1
        self._moved: Integers = np.zeros(2 * self._num_ranks, dtype=np.int64)
        """Bytes that each rank sends, then those that each of the ranks alike receives, at the
        place of the first of them."""
        self._node = {rank: node_of(rank) for rank in everyone}
        self._known: dict[tuple[RankClass, ...], Delivery] = {}

    def of(self, piece: Piece) -> Delivery:
        key = (piece.taker.ranks, *(owner.ranks for owner in piece.holders))
        if key not in self._known:
            holders = sorted(rank for owner in piece.holders for rank in owner.ranks.ranks)
            self._known[key] = self._deliver(holders, takers=piece.taker.ranks.ranks)
        return self._known[key]

    def choose(self, delivery: Delivery, *, size_bytes: int) -> Choice:
        """Where a route has a choice, the least loaded of its senders come first."""
        before = self._moved[delivery.rows]
        after = before + delivery.fixed_loads * size_bytes
        orders = {}
        for route, positions in delivery.free:
            chosen = positions[after[positions].argsort(kind="stable")]
            after[chosen] += route.sends * size_bytes
            orders[route] = delivery.rows[chosen]
        self._moved[delivery.rows] = after
        delivery.bytes_per_taker += size_bytes
        times = (after - before) // size_bytes
        used = times.nonzero()[0]
        return Choice(delivery.rows[used], times[used], orders)

    def sent(self) -> dict[int, int]:
        """Bytes sent by each rank."""
        return {rank: int(self._moved[rank]) for rank in self._node}

    def received(self) -> tuple[dict[int, int], int]:
        """Bytes received by each rank, and all bytes that cross nodes."""
        received, crossing = dict.fromkeys(self._node, 0), 0
        for delivery in self._known.values():
            for route in delivery.routes:
                for taker in route.takers:
                    received[taker] += delivery.bytes_per_taker
                if route.crosses_nodes:
                    crossing += delivery.bytes_per_taker * len(route.takers)
        return received, crossing

    def _deliver(self, holders: list[int], *, takers: Sequence[int]) -> Delivery:
        near: dict[int, list[int]] = {}
        for rank in holders:
            near.setdefault(self._node[rank], []).append(rank)
        local = frozenset(holders) & frozenset(takers)
        away: dict[int | None, list[int]] = {}
        for rank in takers:
            if rank not in local:
                node = self._node[rank]
                away.setdefault(node if node in near else None, []).append(rank)
        routes = []
        for where, ranks in away.items():
            senders = holders if where is None else near[where]
            routes.append(Route(tuple(senders), tuple(ranks), where is None))
        return Delivery(
            local=local & self._listed,
            routes=routes,
            listed=self._listed,
            taker_rows=sorted(
                {self._num_ranks + self._alike[rank] for rank in set(takers) - local}
            ),
        )


class Buckets:
    """Assigns transfers to exchanges of bounded size: each piece to the first one where all its
    ranks have room, so that all pipeline stages send in the same exchange."""

    def __init__(self, everyone: Sequence[int], *, bucket_bytes: int) -> None:
        rows = 2 * (max(everyone, default=0) + 1)
        self._bucket_bytes = bucket_bytes
        self._room: Integers = np.full((rows, _WINDOW), _EMPTY)
        """Bytes left in each bucket (column) for each of a Choice's rows."""
        self._first_open: Integers = np.zeros(rows, dtype=np.int64)
        """All earlier buckets are at least three quarters full: not searched again."""
        self.count = 0

    def place(self, choice: Choice, *, size_bytes: int, count: int) -> list[int]:
        """The buckets of `count` parts of one size of a piece, ascending."""
        rows, loads = choice.rows, (choice.times * size_bytes)[:, None]
        in_empty = np.maximum(self._bucket_bytes // loads, 1)
        found: list[int] = []
        start = int(self._first_open[rows].max())
        while len(found) < count:
            stop = start + _WINDOW
            if stop >= self._room.shape[1]:
                more = np.full_like(self._room, _EMPTY)
                self._room = np.concatenate([self._room, more], axis=1)
            room = self._room[rows, start:stop]
            fit = np.where(room == _EMPTY, in_empty, room // loads).min(axis=0)
            for column in fit.nonzero()[0].tolist():
                parts = min(int(fit[column]), count - len(found))
                left = np.minimum(room[:, column], self._bucket_bytes) - parts * loads[:, 0]
                self._room[rows, start + column] = left
                found += [start + column] * parts
                if len(found) == count:
                    break
            start = stop
        self._pass_full_ones(rows)
        self.count = max(self.count, found[-1] + 1)
        return found

    def _pass_full_ones(self, rows: Integers) -> None:
        at = self._first_open[rows]
        full = self._room[rows, at] <= self._bucket_bytes // 4
        while full.any():
            at += full
            full = self._room[rows, at] <= self._bucket_bytes // 4
        self._first_open[rows] = at


_WINDOW = 8
"""Buckets searched at once."""
_EMPTY = 1 << 60
"""Room in an empty bucket, which takes any piece."""
