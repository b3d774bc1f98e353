"""From two layouts to a schedule of copies and transfers. Integers only: no torch, no processes.

Every rank computes the same plan from the same layouts, so nothing is exchanged to agree on it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from rlhf_megatron.layout.boxes import Box, Placement
from rlhf_megatron.layout.cells import cells, cut_rows
from rlhf_megatron.reshard.pieces import Layouts, Piece, pieces


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
) -> ReshardPlan:
    """Plan how the target ranks get every box of theirs.

    A box comes from the rank's own memory, else from a rank on the same node, else from another;
    among equals from the one that sends least so far. `bucket_bytes` bounds what any rank sends,
    and what it receives, in one exchange (a single row may exceed it). `ranks`: whose transfers to
    list; default all. Asserts that the source holds everything.
    """
    builder = _Builder(
        everyone=sorted({*source, *target}),
        itemsize_bytes=itemsize_bytes,
        bucket_bytes=bucket_bytes,
        node_of=node_of,
        listed=frozenset({*source, *target} if ranks is None else ranks),
    )
    for piece in pieces(source, target):
        builder.add(piece)
    return ReshardPlan(
        itemsize_bytes=itemsize_bytes,
        num_buckets=builder.num_buckets,
        by_rank=builder.rank_plans(),
        received_bytes=builder.received,
        sent_bytes=builder.sent,
        cross_node_bytes=builder.cross_node_bytes,
        minimum_bytes=bytes_minimum(source, target, itemsize_bytes=itemsize_bytes),
    )


class _Builder:
    """Running totals of the pass over all pieces."""

    def __init__(
        self,
        *,
        everyone: list[int],
        itemsize_bytes: int,
        bucket_bytes: int,
        node_of: Callable[[int], int],
        listed: frozenset[int],
    ) -> None:
        self.itemsize_bytes, self.bucket_bytes, self.listed = itemsize_bytes, bucket_bytes, listed
        self.node = {rank: node_of(rank) for rank in everyone}
        self.received = dict.fromkeys(everyone, 0)
        self.sent = dict.fromkeys(everyone, 0)
        self.cross_node_bytes = 0
        self._bucket = 0
        self._bucket_received: dict[int, int] = {}
        self._bucket_sent: dict[int, int] = {}
        self._copies: dict[int, list[Transfer]] = {rank: [] for rank in listed}
        self._sends: dict[int, list[tuple[int, Transfer]]] = {rank: [] for rank in listed}
        self._receives: dict[int, list[tuple[int, Transfer]]] = {rank: [] for rank in listed}

    @property
    def num_buckets(self) -> int:
        return self._bucket + 1 if self._bucket_received else 0

    def add(self, piece: Piece) -> None:
        """Copy the piece where the rank holds it, else choose who sends it, part by part."""
        holders, away = piece.holders, []
        for dst, placement in piece.wanted:
            held = holders.get(dst)
            if held is None:
                away.append((dst, placement))
            elif dst in self.listed:
                self._copies[dst].append(_transfer(piece, piece.box, dst, dst, placement))
        if not away:
            return
        near: dict[int, list[int]] = {}
        for rank in holders:
            near.setdefault(self.node[rank], []).append(rank)
        anywhere = list(holders)
        for part in cut_rows(piece.box, elements=max(1, self.bucket_bytes // self.itemsize_bytes)):
            size = part.numel * self.itemsize_bytes
            for dst, placement in away:
                candidates = near.get(self.node[dst], anywhere)
                src = min(candidates, key=self.sent.__getitem__)
                self._send(piece, part, src, dst, placement, size)

    def _send(
        self, piece: Piece, part: Box, src: int, dst: int, placement: Placement, size: int
    ) -> None:
        sent, received = self._bucket_sent, self._bucket_received
        out, into = sent.get(src, 0) + size, received.get(dst, 0) + size
        if (out > self.bucket_bytes and src in sent) or (
            into > self.bucket_bytes and dst in received
        ):
            self._bucket += 1
            sent.clear()
            received.clear()
            out = into = size
        sent[src], received[dst] = out, into
        self.sent[src] += size
        self.received[dst] += size
        if self.node[src] != self.node[dst]:
            self.cross_node_bytes += size
        if src in self.listed or dst in self.listed:
            entry = (self._bucket, _transfer(piece, part, src, dst, placement))
            if src in self.listed:
                self._sends[src].append(entry)
            if dst in self.listed:
                self._receives[dst].append(entry)

    def rank_plans(self) -> dict[int, RankPlan]:
        return {
            rank: RankPlan(
                self._copies[rank],
                self._in_buckets(self._sends[rank]),
                self._in_buckets(self._receives[rank]),
            )
            for rank in sorted(self.listed)
        }

    def _in_buckets(self, entries: list[tuple[int, Transfer]]) -> list[list[Transfer]]:
        buckets: list[list[Transfer]] = [[] for _ in range(self.num_buckets)]
        for bucket, transfer in entries:
            buckets[bucket].append(transfer)
        return buckets


def _transfer(piece: Piece, part: Box, src: int, dst: int, placement: Placement) -> Transfer:
    held = piece.holders[src]
    return Transfer(
        src,
        dst,
        piece.tensor,
        part,
        held.parameter,
        held.region(part),
        placement.parameter,
        placement.region(part),
    )


def bytes_minimum(source: Layouts, target: Layouts, *, itemsize_bytes: int) -> dict[int, int]:
    """Per target rank, the bytes of its boxes that it does not hold itself.

    No plan can receive fewer with this assignment of shards to ranks, and none needs more. Derived
    from the layouts alone.
    """
    known: dict[tuple[int, int], int] = {}
    found = {}
    for rank, wanted in target.items():
        held = source.get(rank, ())
        key = (id(held), id(wanted))
        if key not in known:
            known[key] = _elements_away(held, wanted)
        found[rank] = known[key] * itemsize_bytes
    return found


def _elements_away(held: tuple[Placement, ...], wanted: tuple[Placement, ...]) -> int:
    own: dict[str, list[Box]] = {}
    for placement in held:
        own.setdefault(placement.tensor, []).append(placement.box)
    disjoint = {name: list(cells(boxes)) for name, boxes in own.items()}
    away = 0
    for placement in wanted:
        common = (placement.box.intersect(box) for box in disjoint.get(placement.tensor, ()))
        away += placement.box.numel - sum(box.numel for box in common if box is not None)
    return away
