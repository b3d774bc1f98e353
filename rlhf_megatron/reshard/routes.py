"""Who sends to whom, and in which bucket: the planner's two decisions. Integers only."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_megatron.reshard.pieces import Piece, RankClass


@dataclass(eq=False)
class Route:
    """Takers that choose among the same senders."""

    senders: tuple[int, ...]
    takers: tuple[int, ...]
    crosses_nodes: bool
    everyone: frozenset[int]
    bytes_per_taker: int = 0
    """Sent so far to each of the takers."""


@dataclass(frozen=True)
class Delivery:
    """How a class of takers gets what a set of holders has."""

    local: frozenset[int]
    """Takers that hold it themselves."""
    routes: tuple[Route, ...]

    @property
    def sends_per_sender(self) -> int:
        """No sender sends a piece more often. (A sender may serve its own node and others.)"""
        times = [-(-len(route.takers) // len(route.senders)) for route in self.routes]
        far = [n for n, route in zip(times, self.routes, strict=True) if route.crosses_nodes]
        return max(times) if len(far) == len(times) else max(times) + sum(far)


class Routes:
    """Finds routes, once for each pair of holders and takers, and keeps count of the bytes."""

    def __init__(self, everyone: Sequence[int], *, node_of: Callable[[int], int]) -> None:
        self.sent = dict.fromkeys(everyone, 0)
        """Bytes that each rank sends."""
        self._node = {rank: node_of(rank) for rank in everyone}
        self._known: dict[tuple[RankClass, ...], Delivery] = {}

    def of(self, piece: Piece) -> Delivery:
        key = (piece.taker.ranks, *(owner.ranks for owner in piece.holders))
        if key not in self._known:
            holders = sorted(rank for owner in piece.holders for rank in owner.ranks.ranks)
            self._known[key] = self._deliver(holders, takers=piece.taker.ranks.ranks)
        return self._known[key]

    def choose(self, route: Route, *, size_bytes: int) -> list[int]:
        """Senders in the order in which the takers, in turn, use them: the least loaded first."""
        senders = sorted(route.senders, key=self.sent.__getitem__)
        each, more = divmod(len(route.takers), len(senders))
        for k, sender in enumerate(senders):
            self.sent[sender] += (each + (k < more)) * size_bytes
        route.bytes_per_taker += size_bytes
        return senders

    def received(self) -> tuple[dict[int, int], int]:
        """Bytes received by each rank, and all bytes that cross nodes."""
        received, crossing = dict.fromkeys(self.sent, 0), 0
        for delivery in self._known.values():
            for route in delivery.routes:
                for taker in route.takers:
                    received[taker] += route.bytes_per_taker
                if route.crosses_nodes:
                    crossing += route.bytes_per_taker * len(route.takers)
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
            everyone = frozenset((*senders, *ranks))
            routes.append(Route(tuple(senders), tuple(ranks), where is None, everyone))
        return Delivery(local, tuple(routes))


class Buckets:
    """Assigns transfers to exchanges of bounded size: each piece to the first one where all its
    ranks have room, so that all pipeline stages send in the same exchange."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._sending: defaultdict[int, _Fills] = defaultdict(_Fills)
        """Per sender."""
        self._taking: defaultdict[int, _Fills] = defaultdict(_Fills)
        """Per class of takers, by its first rank."""

    @property
    def count(self) -> int:
        return max((len(fills.bytes) for fills in self._taking.values()), default=0)

    def place(self, loads: Mapping[int, int], *, taker: int, size_bytes: int) -> int:
        """The bucket of a piece: `loads` are the bytes each sender sends of it."""
        sides = [(self._taking[taker], size_bytes)]
        sides += [(self._sending[rank], load) for rank, load in loads.items()]
        bucket = max(fills.first_open for fills, _ in sides)
        while not all(fills.fits(bucket, load, self._bucket_bytes) for fills, load in sides):
            bucket += 1
        for fills, load in sides:
            fills.add(bucket, load, self._bucket_bytes)
        return bucket


class _Fills:
    """Bytes in each bucket of one rank."""

    __slots__ = ("bytes", "first_open")

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.first_open = 0
        """All earlier buckets are at least three quarters full: not searched again."""

    def fits(self, bucket: int, load: int, limit: int) -> bool:
        if bucket >= len(self.bytes):
            return True
        fill = self.bytes[bucket]
        return not fill or fill + load <= limit

    def add(self, bucket: int, load: int, limit: int) -> None:
        fills = self.bytes
        while len(fills) <= bucket:
            fills.append(0)
        fills[bucket] += load
        while self.first_open < len(fills) and 4 * fills[self.first_open] >= 3 * limit:
            self.first_open += 1
