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

from rlhf_megatron.reshard.messages import Message, direct_bytes, make_exchange
from rlhf_megatron.reshard.plan import BUCKETS_IN_FLIGHT, ReshardPlan, Transfer
from rlhf_megatron.reshard.strips import join

logger = logging.getLogger("rlhf_megatron.reshard")

WORD = torch.int64
"""What copies move, to pack and to unpack as well, where sizes and strides allow it."""

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
    words: list[Tensor]
    """The same as words; empty where some do not allow it."""
    is_direct: bool
    """It lies in one piece in a parameter, on the device where the buffers are, and travels from
    there or to there without one."""


@dataclass(frozen=True)
class _Bound:
    """Views of the parameters as they lie in memory now. Making a view takes longer than to launch
    its copy, and a large model's sync is a thousand copies in a few milliseconds.
    """

    addresses: list[int]
    copies: list[tuple[Tensor, Tensor]]
    """Place and value."""
    sends: list[list[_Parcel]]
    """Of each exchange."""
    receives: list[list[_Parcel]]
    """Of each exchange."""

    def buffer_numel(self) -> tuple[int, int]:
        """The largest exchange's elements that are not direct, to send and to receive."""
        sends, receives = (
            max((sum(p.numel for p in parcels if not p.is_direct) for parcels in side), default=0)
            for side in (self.sends, self.receives)
        )
        return sends, receives


class _Buffer:
    """A place for the packed messages of one bucket."""

    def __init__(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._elements = torch.empty(numel, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self._elements.numel() * self._elements.dtype.itemsize

    def messages(self, parcels: Sequence[_Parcel]) -> list[Tensor]:
        """A flat tensor for each parcel: its own view where it is direct, else a piece of this."""
        tensors, start = [], 0
        for parcel in parcels:
            if parcel.is_direct:
                tensors.append(parcel.views[0])
            else:
                tensors.append(self._elements[start : start + parcel.numel])
                start += parcel.numel
        return tensors


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
        self._buffers: list[_Buffer] = []
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
            begun = self._begin(number, sends=bound.sends[number], receives=bound.receives[number])
            # The local copies are spread over the exchanges, to pass the time of each.
            self._copy_locally(bound.copies[number::count])
            if travelling is not None:
                received += self._end(number - 1, works=travelling, parcels=bound.receives)
            travelling = begun
        if travelling is not None:
            received += self._end(count - 1, works=travelling, parcels=bound.receives)
        else:
            self._copy_locally(bound.copies)
        self._synchronize()
        return ReshardStats(
            bytes_received=received,
            bytes_minimum=self._minimum_bytes,
            seconds=time.perf_counter() - start,
            num_operations=count,
            buffer_bytes=sum(buffer.num_bytes for buffer in self._buffers),
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
                copies=[
                    _in_words(
                        strip.target.of(target), value=strip.source.of(source), dtype=self._dtype
                    )
                    for strip in self._copies
                ],
                sends=[
                    [
                        self._parcel(m, views=[s.source.of(source) for s in m.strips])
                        for m in e.sends
                    ]
                    for e in self._exchanges
                ],
                receives=[
                    [
                        self._parcel(m, views=[s.target.of(target) for s in m.strips])
                        for m in e.receives
                    ]
                    for e in self._exchanges
                ],
            )
        return self._bound

    def _check(self, source: Mapping[str, Tensor], *, target: Mapping[str, Tensor]) -> None:
        """Names, ranks and sizes of the parameters are those of the layouts."""
        sent = [s for e in self._exchanges for message in e.sends for s in message.strips]
        received = [s for e in self._exchanges for message in e.receives for s in message.strips]
        wrong = {s.source.parameter for s in self._copies + sent if not s.source.lies_in(source)}
        wrong |= {
            s.target.parameter for s in self._copies + received if not s.target.lies_in(target)
        }
        assert not wrong, f"not as the layouts have them: {sorted(wrong)}"

    def _copy_locally(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        for place, value in copies:
            if place.dtype not in (self._dtype, WORD):
                # Through `dtype` as a transfer would go, so that replicas are equal bit for bit.
                value = value.to(self._dtype)
            place.copy_(value)

    def _parcel(self, message: Message, *, views: list[Tensor]) -> _Parcel:
        flat = [view.view(-1) if view.is_contiguous() else view for view in views]
        converts = any(view.dtype != self._dtype for view in flat)
        is_direct = len(flat) == 1 and flat[0].dim() == 1 and not converts
        # All of a bucket travels on one kind of device: an export receives into host memory.
        is_direct = is_direct and flat[0].device.type == self._device.type
        words = []
        if not converts and all(map(_holds_words, flat)):
            words = [view.view(WORD) for view in flat]
        return _Parcel(message.peer, message.numel, flat, words, is_direct)

    def _make_buffers(self, bound: _Bound) -> list[_Buffer]:
        return [
            _Buffer(numel, dtype=self._dtype, device=self._device)
            for _ in range(min(BUCKETS_IN_FLIGHT, len(self._exchanges)))
            for numel in bound.buffer_numel()
        ]

    def _begin(
        self, number: int, *, sends: Sequence[_Parcel], receives: Sequence[_Parcel]
    ) -> list[dist.Work]:
        outgoing = self._send_buffer(number).messages(sends)
        incoming = self._receive_buffer(number).messages(receives)
        for parcel, message in zip(sends, outgoing, strict=True):
            if not parcel.is_direct:
                for slot, value in _slots(parcel, message=message):
                    slot.copy_(value)
        operations = [
            dist.P2POp(call, tensor, parcel.peer, self._group)
            for call, parcels, tensors in (
                (dist.irecv, receives, incoming),
                (dist.isend, sends, outgoing),
            )
            for parcel, tensor in zip(parcels, tensors, strict=True)
        ]
        start = time.perf_counter()
        works: list[dist.Work] = dist.batch_isend_irecv(operations) if operations else []
        if self._debug:
            for work in works:
                work.wait()
            self._synchronize()
            self._log(number, sends=sends, receives=receives, seconds=time.perf_counter() - start)
            return []
        return works

    def _end(
        self, number: int, *, works: Sequence[dist.Work], parcels: Sequence[Sequence[_Parcel]]
    ) -> int:
        """Returns the bytes that have arrived at their places."""
        for work in works:
            work.wait()
        arrived = 0
        messages = self._receive_buffer(number).messages(parcels[number])
        for parcel, message in zip(parcels[number], messages, strict=True):
            if not parcel.is_direct:
                for slot, place in _slots(parcel, message=message):
                    place.copy_(slot)
            arrived += message.numel()
        return arrived * self._dtype.itemsize

    def _send_buffer(self, number: int) -> _Buffer:
        return self._buffers[2 * (number % BUCKETS_IN_FLIGHT)]

    def _receive_buffer(self, number: int) -> _Buffer:
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


def _in_words(place: Tensor, *, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both as 8-byte integers where they allow it, and neither is converted to `dtype`: a GPU
    copies strided elements one by one, and 16-bit ones at half the memory's rate."""
    both = (place, value)
    if any(x.dtype != dtype for x in both) or not all(map(_holds_words, both)):
        return place, value
    return place.view(WORD), value.view(WORD)


def _holds_words(x: Tensor) -> bool:
    per_word = WORD.itemsize // x.itemsize
    aligned = (x.size(-1), x.storage_offset(), *x.stride()[:-1])
    return (
        x.stride(-1) == 1
        and x.data_ptr() % WORD.itemsize == 0
        and not any(n % per_word for n in aligned)
    )


def _look_up(tensors: Tensors) -> Mapping[str, Tensor]:
    return tensors() if callable(tensors) else tensors


def _slots(parcel: _Parcel, *, message: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each view's place in the packed message, shaped like the view, and the view."""
    views = parcel.views
    if parcel.words and _holds_words(message):
        message, views = message.view(WORD), parcel.words
    slots = message.split([view.numel() for view in views])
    return [
        (slot if view.dim() == 1 else slot.view(view.shape), view)
        for slot, view in zip(slots, views, strict=True)
    ]
