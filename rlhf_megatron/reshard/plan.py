"""From two layouts to a schedule of copies and transfers. Integers only: no torch, no processes.

Every rank computes the same plan from the same layouts, so nothing is exchanged to agree on it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

from rlhf_megatron.layout.boxes import Box
from rlhf_megatron.layout.cells import cut_rows
from rlhf_megatron.reshard.minimum import Away, bytes_minimum
from rlhf_megatron.reshard.pieces import Layouts, Piece, pieces
from rlhf_megatron.reshard.routes import Buckets, Route, Routes

BUCKETS_IN_FLIGHT = 2
"""While one travels, its neighbour is packed or unpacked. Who has memory for two buckets to send
from and receive in at once plans with half of it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """`box` of `tensor` goes from one place to another; a local copy where `src` is `dst`."""

    src: int
    dst: int
    """Global ranks."""
    tensor: str
    box: Box
    source_parameter: str
    source_region: tuple[slice, ...]
    target_parameter: str
    target_region: tuple[slice, ...]


@dataclass(frozen=True)
class RankPlan:
    """What one rank does. Sends and receives are lists of buckets, the same number on all ranks;
    within a bucket, two ranks list the transfers between them in the same order."""

    copies: list[Transfer]
    sends: list[list[Transfer]]
    receives: list[list[Transfer]]


@dataclass(frozen=True)
class ReshardPlan:
    """A schedule: local copies, then `num_buckets` exchanges."""

    itemsize_bytes: int
    """Bytes of an element on its way."""
    num_buckets: int
    by_rank: dict[int, RankPlan]
    """Of the ranks asked for."""
    received_bytes: dict[int, int]
    """Per rank, over all ranks of source and target."""
    sent_bytes: dict[int, int]
    cross_node_bytes: int
    minimum_bytes: dict[int, int]
    """Per target rank, from the layouts alone (`bytes_minimum`)."""

    def bytes_received(self, rank: int) -> int:
        return self.received_bytes.get(rank, 0)

    @property
    def bytes_received_total(self) -> int:
        return sum(self.received_bytes.values())

    @property
    def bytes_minimum_total(self) -> int:
        return sum(self.minimum_bytes.values())


def one_node(rank: int) -> int:
    """Every rank on the same node."""
    return 0


def make_plan(
    source: Layouts,
    target: Layouts,
    *,
    itemsize_bytes: int,
    bucket_bytes: int,
    node_of: Callable[[int], int] = one_node,
    ranks: Collection[int] | None = None,
    away: Away | None = None,
) -> ReshardPlan:
    """Plan how the target ranks get every box of theirs.

    A box comes from the rank's own memory, else from a rank on the same node, else from another;
    among equals from those that send least so far. `bucket_bytes` bounds what any rank sends, and
    what it receives, in one exchange (single rows may exceed it). `ranks`: whose transfers to list;
    default all. `away`: what is known of these layouts already. Asserts that the source holds
    everything.
    """
    everyone = sorted({*source, *target})
    listed = frozenset(everyone if ranks is None else ranks)
    builder = _Builder(
        routes=Routes(
            everyone, node_of=node_of, listed=listed, alike=_alike(everyone, source, target)
        ),
        buckets=Buckets(everyone, bucket_bytes=bucket_bytes),
        itemsize_bytes=itemsize_bytes,
        bucket_bytes=bucket_bytes,
        listed=listed,
    )
    for piece in pieces(source, target):
        builder.add(piece)
    received, cross_node_bytes = builder.routes.received()
    return ReshardPlan(
        itemsize_bytes=itemsize_bytes,
        num_buckets=builder.buckets.count,
        by_rank=builder.rank_plans(),
        received_bytes=received,
        sent_bytes=builder.routes.sent(),
        cross_node_bytes=cross_node_bytes,
        minimum_bytes=bytes_minimum(source, target, itemsize_bytes=itemsize_bytes, away=away),
    )


def _alike(everyone: Sequence[int], source: Layouts, target: Layouts) -> dict[int, int]:
    """Per rank, the first rank with the same layouts: it receives the same bytes in each bucket."""
    first: dict[tuple[int, int], int] = {}
    return {
        rank: first.setdefault((id(source.get(rank)), id(target.get(rank))), rank)
        for rank in everyone
    }


class _Builder:
    """The pass over all pieces: sources, buckets, and the transfers of the listed ranks."""

    def __init__(
        self,
        *,
        routes: Routes,
        buckets: Buckets,
        itemsize_bytes: int,
        bucket_bytes: int,
        listed: frozenset[int],
    ) -> None:
        self.routes, self.buckets = routes, buckets
        self._itemsize_bytes, self._bucket_bytes = itemsize_bytes, bucket_bytes
        self._listed = listed
        self._copies: dict[int, list[Transfer]] = {rank: [] for rank in listed}
        self._sends: dict[int, list[tuple[int, Transfer]]] = {rank: [] for rank in listed}
        self._receives: dict[int, list[tuple[int, Transfer]]] = {rank: [] for rank in listed}

    def add(self, piece: Piece) -> None:
        """List the local copies; cut the rest into parts and choose a sender for each taker."""
        delivery = self.routes.of(piece)
        for rank in delivery.local:
            self._copies[rank].append(_transfer(piece, piece.box, rank, rank))
        if not delivery.routes:
            return
        choice = self.routes.choose(delivery, size_bytes=piece.box.numel * self._itemsize_bytes)
        largest = self._bucket_bytes // (self._itemsize_bytes * delivery.sends_per_sender)
        parts = list(cut_rows(piece.box, elements=max(1, largest)))
        buckets: list[int] = []
        for elements, alike in groupby(part.numel for part in parts):
            size = elements * self._itemsize_bytes
            buckets += self.buckets.place(choice, size_bytes=size, count=len(list(alike)))
        for part, bucket in zip(parts, buckets, strict=True):
            for route in delivery.listed:
                self._list(piece, part, route, choice.of(route), bucket)

    def _list(
        self, piece: Piece, part: Box, route: Route, senders: Sequence[int], bucket: int
    ) -> None:
        takers, count = route.takers, len(senders)
        for first, src in enumerate(senders):
            is_sender_listed = src in self._listed
            for dst in takers[first::count]:
                if is_sender_listed or dst in self._listed:
                    entry = (bucket, _transfer(piece, part, src, dst))
                    if is_sender_listed:
                        self._sends[src].append(entry)
                    if dst in self._listed:
                        self._receives[dst].append(entry)

    def rank_plans(self) -> dict[int, RankPlan]:
        return {
            rank: RankPlan(
                self._copies[rank],
                self._in_buckets(self._sends[rank]),
                self._in_buckets(self._receives[rank]),
            )
            for rank in sorted(self._listed)
        }

    def _in_buckets(self, entries: list[tuple[int, Transfer]]) -> list[list[Transfer]]:
        found: list[list[Transfer]] = [[] for _ in range(self.buckets.count)]
        for bucket, transfer in entries:
            found[bucket].append(transfer)
        return found


def _transfer(piece: Piece, part: Box, src: int, dst: int) -> Transfer:
    held = next(owner.placement for owner in piece.holders if src in owner.ranks.members)
    place = piece.taker.placement
    return Transfer(
        src,
        dst,
        piece.tensor,
        part,
        held.parameter,
        held.region(part),
        place.parameter,
        place.region(part),
    )
