"""Carrying out a plan: local copies, and one uneven all-to-all per bucket, written in place.

While one bucket travels, the one before it is unpacked and the one after it is packed.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.reshard.plan import BUCKETS_IN_FLIGHT, ReshardPlan, Transfer
from rlhf_megatron.reshard.strips import Strip, join

logger = logging.getLogger("rlhf_megatron.reshard")

Tensors = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]
"""Parameters by name, or what returns them, asked in each run. Their storage may move between runs.
"""


@dataclass(frozen=True, kw_only=True)
class ReshardStats:
    """What one sync did on this rank."""

    bytes_received: int
    """Counted as the transfers from other ranks are written."""
    bytes_minimum: int
    """The least this rank could receive, from the layouts."""
    seconds: float
    num_operations: int
    """Collectives."""
    buffer_bytes: int
    """Of all transfer buffers."""


@dataclass(frozen=True)
class _Exchange:
    """One bucket: strips in the order of the group's ranks, and bytes per group rank."""

    sends: list[Strip]
    receives: list[Strip]
    send_bytes: list[int]
    receive_bytes: list[int]


@dataclass(frozen=True)
class _Bound:
    """Views of the parameters as they lie in memory now. Making a view takes longer than to launch
    its copy, and a large model's sync is a thousand copies in a few milliseconds.
    """

    addresses: list[int]
    copies: list[tuple[Tensor, Tensor]]
    """Place and value."""
    sends: list[list[Tensor]]
    """Values of each exchange; flat where they are contiguous."""
    receives: list[list[Tensor]]
    """Places of each exchange; flat where they are contiguous."""


class _Buffer:
    """A place for one bucket."""

    def __init__(self, num_bytes: int, *, device: torch.device) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def head(self, num_bytes: int) -> Tensor:
        return self._bytes[:num_bytes]

    def slots(self, strips: Sequence[Strip], *, dtype: torch.dtype) -> Sequence[Tensor]:
        """A flat place for each strip, one after another."""
        counts = [strip.numel for strip in strips]
        typed: Tensor = self._bytes[: sum(counts) * dtype.itemsize].view(dtype)
        return typed.split(counts)


class Resharder:
    """Moves weights by one plan, over and over.

    Collective over `group`, whose ranks may send, receive, both or neither. Elements travel as
    `dtype`, converted by the sender. `device` holds the buffers, two to send from and two to
    receive in, each of the size of the plan's largest bucket; they stay until `release_buffers`.
    Views of the parameters are kept between runs, and with them the storage that they had: who
    gives the parameters other storage to save memory must `release` them. With the environment
    variable RLHF_MEGATRON_DEBUG=1 each collective is timed, by itself, and logged.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        *,
        rank: int,
        group: dist.ProcessGroup,
        source: Tensors,
        target: Tensors,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert dtype.itemsize == plan.itemsize_bytes, (dtype, plan.itemsize_bytes)
        self._rank, self._group = rank, group
        self._source, self._target = source, target
        self._dtype, self._device = dtype, device
        self._minimum_bytes = plan.minimum_bytes.get(rank, 0)
        self._debug = os.environ.get("RLHF_MEGATRON_DEBUG") == "1"
        ranks = dist.get_process_group_ranks(group)
        mine = plan.by_rank.get(rank)
        self._copies = join(mine.copies if mine else [])
        empty: list[list[Transfer]] = [[] for _ in range(plan.num_buckets)]
        self._exchanges = [
            _exchange(sends, receives=receives, ranks=ranks, itemsize_bytes=plan.itemsize_bytes)
            for sends, receives in zip(
                mine.sends if mine else empty, mine.receives if mine else empty, strict=True
            )
        ]
        in_flight = min(BUCKETS_IN_FLIGHT, len(self._exchanges))
        self._buffer_bytes = [
            max((sum(e.send_bytes) for e in self._exchanges), default=0),
            max((sum(e.receive_bytes) for e in self._exchanges), default=0),
        ] * in_flight
        self._buffers: list[_Buffer] = []
        self._bound: _Bound | None = None

    @torch.no_grad()
    def run(self) -> ReshardStats:
        """Bring the target's parameters up to date."""
        self._synchronize()
        start = time.perf_counter()
        bound = self._bind()
        if not self._buffers:
            self._buffers = [_Buffer(size, device=self._device) for size in self._buffer_bytes]
        received, count = 0, len(self._exchanges)
        travelling: dist.Work | None = None
        for number in range(count):
            self._pack(number, values=bound.sends[number])
            begun = self._begin(number)
            # The local copies are spread over the exchanges, to pass the time of each.
            self._copy_locally(bound.copies[number::count])
            if travelling is not None:
                travelling.wait()
                received += self._unpack(number - 1, places=bound.receives[number - 1])
            travelling = begun
        if travelling is not None:
            travelling.wait()
            received += self._unpack(count - 1, places=bound.receives[count - 1])
        else:
            self._copy_locally(bound.copies)
        self._synchronize()
        return ReshardStats(
            bytes_received=received,
            bytes_minimum=self._minimum_bytes,
            seconds=time.perf_counter() - start,
            num_operations=count,
            buffer_bytes=sum(self._buffer_bytes),
        )

    def release_buffers(self) -> None:
        """Give the buffers' memory back; the next run allocates them again."""
        self._buffers = []

    def release(self) -> None:
        """Hold on to nothing but the plan."""
        self._buffers, self._bound = [], None

    def _bind(self) -> _Bound:
        """The views, made again where a parameter has moved."""
        source, target = _look_up(self._source), _look_up(self._target)
        addresses = [tensor.data_ptr() for tensor in (*source.values(), *target.values())]
        if self._bound is None or self._bound.addresses != addresses:
            self._check(source, target=target)
            self._bound = _Bound(
                addresses,
                copies=[
                    (strip.target.of(target), strip.source.of(source)) for strip in self._copies
                ],
                sends=[[_flat(s.source.of(source)) for s in e.sends] for e in self._exchanges],
                receives=[
                    [_flat(s.target.of(target)) for s in e.receives] for e in self._exchanges
                ],
            )
        return self._bound

    def _check(self, source: Mapping[str, Tensor], *, target: Mapping[str, Tensor]) -> None:
        """Names, ranks and sizes of the parameters are those of the layouts."""
        sent = [strip for exchange in self._exchanges for strip in exchange.sends]
        received = [strip for exchange in self._exchanges for strip in exchange.receives]
        wrong = {s.source.parameter for s in self._copies + sent if not s.source.lies_in(source)}
        wrong |= {
            s.target.parameter for s in self._copies + received if not s.target.lies_in(target)
        }
        assert not wrong, f"not as the layouts have them: {sorted(wrong)}"

    def _copy_locally(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        for place, value in copies:
            if place.dtype != self._dtype:
                # Through `dtype` as a transfer would go, so that replicas are equal bit for bit.
                value = value.to(self._dtype)
            place.copy_(value)

    def _pack(self, number: int, *, values: Sequence[Tensor]) -> None:
        strips = self._exchanges[number].sends
        slots = self._send_buffer(number).slots(strips, dtype=self._dtype)
        for slot, value in zip(slots, values, strict=True):
            (slot if value.dim() == 1 else slot.view(value.shape)).copy_(value)

    def _begin(self, number: int) -> dist.Work:
        exchange = self._exchanges[number]
        outgoing = self._send_buffer(number).head(sum(exchange.send_bytes))
        incoming = self._receive_buffer(number).head(sum(exchange.receive_bytes))
        start = time.perf_counter()
        work: dist.Work = dist.all_to_all_single(
            incoming,
            outgoing,
            output_split_sizes=exchange.receive_bytes,
            input_split_sizes=exchange.send_bytes,
            group=self._group,
            async_op=True,
        )
        if self._debug:
            work.wait()
            self._synchronize()
            logger.info(
                "reshard all_to_all_single bucket %d of %d: rank %d sent shape [%d], as many bytes,"
                " in %d strips, received shape [%d] in %d, %.3f ms",
                number + 1,
                len(self._exchanges),
                self._rank,
                outgoing.numel(),
                len(exchange.sends),
                incoming.numel(),
                len(exchange.receives),
                1e3 * (time.perf_counter() - start),
            )
        return work

    def _unpack(self, number: int, *, places: Sequence[Tensor]) -> int:
        """Returns the bytes written."""
        strips = self._exchanges[number].receives
        slots = self._receive_buffer(number).slots(strips, dtype=self._dtype)
        written = 0
        for slot, place in zip(slots, places, strict=True):
            place.copy_(slot if place.dim() == 1 else slot.view(place.shape))
            written += slot.numel()
        return written * self._dtype.itemsize

    def _send_buffer(self, number: int) -> _Buffer:
        return self._buffers[2 * (number % BUCKETS_IN_FLIGHT)]

    def _receive_buffer(self, number: int) -> _Buffer:
        return self._buffers[2 * (number % BUCKETS_IN_FLIGHT) + 1]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _look_up(tensors: Tensors) -> Mapping[str, Tensor]:
    return tensors() if callable(tensors) else tensors


def _flat(view: Tensor) -> Tensor:
    return view.view(-1) if view.is_contiguous() else view


def _exchange(
    sends: list[Transfer], *, receives: list[Transfer], ranks: list[int], itemsize_bytes: int
) -> _Exchange:
    """Order the transfers by group rank (stable, so both ends agree) and count the bytes."""
    position = {rank: index for index, rank in enumerate(ranks)}
    send_bytes, receive_bytes = [0] * len(ranks), [0] * len(ranks)
    for transfer in sends:
        send_bytes[position[transfer.dst]] += transfer.box.numel * itemsize_bytes
    for transfer in receives:
        receive_bytes[position[transfer.src]] += transfer.box.numel * itemsize_bytes
    return _Exchange(
        sends=join(sorted(sends, key=lambda transfer: position[transfer.dst])),
        receives=join(sorted(receives, key=lambda transfer: position[transfer.src])),
        send_bytes=send_bytes,
        receive_bytes=receive_bytes,
    )
