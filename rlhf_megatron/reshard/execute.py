"""Carrying out a plan: local copies, and grouped sends and receives per bucket, written in place.

A large strip that lies in one piece in the sender's parameter is sent from there, and received
where it belongs in the receiver's; the rest is packed and unpacked. While one bucket travels, the
one before it is unpacked and the one after it is packed.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.reshard.copies import LocalCopies, Packing
from rlhf_megatron.reshard.messages import Message, direct_bytes, make_exchange
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
    """Buckets exchanged."""
    buffer_bytes: int
    """Of all transfer buffers."""


@dataclass(frozen=True)
class _Parcel:
    """A message and the views of its strips; flat where they are contiguous."""

    peer: int
    numel: int
    views: list[Tensor]
    is_direct: bool
    """It lies in one piece in a parameter, on the device where the buffers are, and travels from
    there or to there without one."""


class _Side:
    """What one exchange sends, or what it receives."""

    def __init__(
        self, parcels: list[_Parcel], *, dtype: torch.dtype, device: torch.device, is_sent: bool
    ) -> None:
        self.parcels = parcels
        self.numel = sum(view.numel() for parcel in parcels for view in parcel.views)
        packed = [view for p in parcels if not p.is_direct for view in p.views]
        self.packing = Packing(packed, dtype=dtype, device=device, into_buffer=is_sent)

    def messages(self, buffer: Tensor) -> list[Tensor]:
        """A flat tensor for each parcel: its own view where it is direct, else a piece of the
        buffer."""
        tensors, start = [], 0
        for parcel in self.parcels:
            if parcel.is_direct:
                tensors.append(parcel.views[0])
            else:
                tensors.append(buffer[start : start + parcel.numel])
                start += parcel.numel
        return tensors


@dataclass(frozen=True)
class _Bound:
    """Views of the parameters as they lie in memory now. Making a view takes longer than to launch
    its copy, and a large model's sync is a thousand copies in a few milliseconds.
    """

    addresses: list[int]
    copies: list[LocalCopies]
    """Spread over the exchanges, to pass the time of each; all of them where there is none."""
    sends: list[_Side]
    """Of each exchange."""
    receives: list[_Side]
    """Of each exchange."""


class Resharder:
    """Moves weights by one plan, over and over.

    Collective over `group`, whose ranks may send, receive, both or neither. Elements travel as
    `dtype`, converted by the sender. Strips of `least_direct_bytes` or more (default: those of
    messages.direct_bytes) travel unpacked where they lie in one piece. `device` holds the buffers,
    two to send from and two to receive in, each as large as what any bucket has to pack; they stay
    until `release_buffers`.
    Views of the parameters are kept between runs, and with them the storage that they had: who
    gives the parameters other storage to save memory must `release` them. With the environment
    variable RLHF_MEGATRON_DEBUG=1 each exchange is timed, by itself, and logged.
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
        least_direct_bytes: int | None = None,
    ) -> None:
        assert dtype.itemsize == plan.itemsize_bytes, (dtype, plan.itemsize_bytes)
        self._rank, self._group = rank, group
        self._source, self._target = source, target
        self._dtype, self._device = dtype, device
        self._minimum_bytes = plan.minimum_bytes.get(rank, 0)
        self._debug = os.environ.get("RLHF_MEGATRON_DEBUG") == "1"
        position = {r: index for index, r in enumerate(dist.get_process_group_ranks(group))}
        mine = plan.by_rank.get(rank)
        self._copies = join(mine.copies if mine else [])
        least = least_direct_bytes or direct_bytes(on_gpu=device.type == "cuda")
        empty: list[list[Transfer]] = [[] for _ in range(plan.num_buckets)]
        self._exchanges = [
            make_exchange(
                sends,
                receives=receives,
                position=position.__getitem__,
                direct_numel=least // plan.itemsize_bytes,
            )
            for sends, receives in zip(
                mine.sends if mine else empty, mine.receives if mine else empty, strict=True
            )
        ]
        self._buffers: list[Tensor] = []
        self._bound: _Bound | None = None
        self._has_joined = False

    @torch.no_grad()
    def run(self) -> ReshardStats:
        """Bring the target's parameters up to date."""
        self._join_group()
        self._synchronize()
        start = time.perf_counter()
        bound = self._bind()
        if not self._buffers:
            self._buffers = self._make_buffers(bound)
        received, count = 0, len(self._exchanges)
        travelling: list[dist.Work] | None = None
        for number in range(count):
            begun = self._begin(number, bound=bound)
            bound.copies[number].run()
            if travelling is not None:
                received += self._end(number - 1, works=travelling, bound=bound)
            travelling = begun
        if travelling is not None:
            received += self._end(count - 1, works=travelling, bound=bound)
        else:
            bound.copies[0].run()
        self._synchronize()
        return ReshardStats(
            bytes_received=received,
            bytes_minimum=self._minimum_bytes,
            seconds=time.perf_counter() - start,
            num_operations=count,
            buffer_bytes=sum(buffer.nbytes for buffer in self._buffers),
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
            self._buffers = []  # what needs packing may have changed
            self._bound = _Bound(
                addresses,
                copies=self._local_copies(source, target=target),
                sends=[
                    self._side(e.sends, views=lambda strip: strip.source.of(source), is_sent=True)
                    for e in self._exchanges
                ],
                receives=[
                    self._side(
                        e.receives, views=lambda strip: strip.target.of(target), is_sent=False
                    )
                    for e in self._exchanges
                ],
            )
        return self._bound

    def _local_copies(
        self, source: Mapping[str, Tensor], *, target: Mapping[str, Tensor]
    ) -> list[LocalCopies]:
        count = max(1, len(self._exchanges))
        return [
            LocalCopies(
                [strip.target.of(target) for strip in self._copies[number::count]],
                values=[strip.source.of(source) for strip in self._copies[number::count]],
                dtype=self._dtype,
            )
            for number in range(count)
        ]

    def _side(
        self, messages: Sequence[Message], *, views: Callable[[Strip], Tensor], is_sent: bool
    ) -> _Side:
        parcels = [self._parcel(m, views=[views(strip) for strip in m.strips]) for m in messages]
        return _Side(parcels, dtype=self._dtype, device=self._device, is_sent=is_sent)

    def _check(self, source: Mapping[str, Tensor], *, target: Mapping[str, Tensor]) -> None:
        """Names, ranks and sizes of the parameters are those of the layouts."""
        sent = [s for e in self._exchanges for message in e.sends for s in message.strips]
        received = [s for e in self._exchanges for message in e.receives for s in message.strips]
        wrong = {s.source.parameter for s in self._copies + sent if not s.source.lies_in(source)}
        wrong |= {
            s.target.parameter for s in self._copies + received if not s.target.lies_in(target)
        }
        assert not wrong, f"not as the layouts have them: {sorted(wrong)}"

    def _parcel(self, message: Message, *, views: list[Tensor]) -> _Parcel:
        flat = [view.view(-1) if view.is_contiguous() else view for view in views]
        converts = any(view.dtype != self._dtype for view in flat)
        is_direct = len(flat) == 1 and flat[0].dim() == 1 and not converts
        # All of a bucket travels on one kind of device: an export receives into host memory.
        is_direct = is_direct and flat[0].device.type == self._device.type
        return _Parcel(message.peer, message.numel, flat, is_direct)

    def _make_buffers(self, bound: _Bound) -> list[Tensor]:
        return [
            torch.empty(
                max(side.packing.numel for side in sides), dtype=self._dtype, device=self._device
            )
            for _ in range(min(BUCKETS_IN_FLIGHT, len(self._exchanges)))
            for sides in (bound.sends, bound.receives)
        ]

    def _begin(self, number: int, *, bound: _Bound) -> list[dist.Work]:
        sends, receives = bound.sends[number], bound.receives[number]
        outgoing, incoming = self._send_buffer(number), self._receive_buffer(number)
        sends.packing.run(outgoing)
        operations = [
            dist.P2POp(call, tensor, parcel.peer, self._group)
            for call, side, buffer in (
                (dist.irecv, receives, incoming),
                (dist.isend, sends, outgoing),
            )
            for parcel, tensor in zip(side.parcels, side.messages(buffer), strict=True)
        ]
        start = time.perf_counter()
        works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
        if self._debug:
            for work in works:
                work.wait()
            self._synchronize()
            self._log(
                number,
                sends=sends.parcels,
                receives=receives.parcels,
                seconds=time.perf_counter() - start,
            )
            return []
        return works

    def _end(self, number: int, *, works: Sequence[dist.Work], bound: _Bound) -> int:
        """Returns the bytes that have arrived at their places."""
        for work in works:
            work.wait()
        receives = bound.receives[number]
        receives.packing.run(self._receive_buffer(number))
        return receives.numel * self._dtype.itemsize

    def _send_buffer(self, number: int) -> Tensor:
        return self._buffers[2 * (number % BUCKETS_IN_FLIGHT)]

    def _receive_buffer(self, number: int) -> Tensor:
        return self._buffers[2 * (number % BUCKETS_IN_FLIGHT) + 1]

    def _join_group(self) -> None:
        """NCCL makes a group's communicator in its first call, which all of its ranks must enter; a
        rank that neither sends nor receives would stay out of a batch of sends and receives."""
        if not self._has_joined and self._device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
        self._has_joined = True

    def _log(
        self,
        number: int,
        *,
        sends: Sequence[_Parcel],
        receives: Sequence[_Parcel],
        seconds: float,
    ) -> None:
        sent, received = (
            f"{len(parcels)} messages of shapes {[[parcel.numel] for parcel in parcels]} in "
            f"{sum(len(parcel.views) for parcel in parcels)} strips, "
            f"{sum(parcel.numel for parcel in parcels) * self._dtype.itemsize} bytes"
            for parcels in (sends, receives)
        )
        logger.info(
            "reshard exchange %d of %d: rank %d sent %s; received %s; %.3f ms",
            number + 1,
            len(self._exchanges),
            self._rank,
            sent,
            received,
            1e3 * seconds,
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _look_up(tensors: Tensors) -> Mapping[str, Tensor]:
    return tensors() if callable(tensors) else tensors
