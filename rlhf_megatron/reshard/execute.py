"""Carrying out a plan: local copies, then one uneven all-to-all per bucket, written in place."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.reshard.plan import ReshardPlan, Transfer

logger = logging.getLogger("rlhf_megatron.reshard")

Tensors = Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]
"""Parameters by name, or what returns them: looked up in each run, since storage may move."""


@dataclass(frozen=True, kw_only=True)
class ReshardStats:
    """What one sync did on this rank."""

    bytes_received: int
    """Counted as the transfers arrive from other ranks."""
    bytes_minimum: int
    """The least this rank could receive, from the layouts."""
    seconds: float
    num_operations: int
    """Collectives."""


@dataclass(frozen=True)
class _Exchange:
    """One bucket: transfers in the order of the group's ranks, and bytes per group rank."""

    sends: list[Transfer]
    receives: list[Transfer]
    send_bytes: list[int]
    receive_bytes: list[int]


class Resharder:
    """Moves weights by one plan, over and over.

    Collective over `group`, whose ranks may send, receive, both or neither. Elements travel as
    `dtype`, converted by the sender. `device` holds the two buffers, which stay until
    `release_buffers`. With the environment variable RLHF_MEGATRON_DEBUG=1 each collective is
    logged.
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
        self._plan, self._rank, self._group = plan, rank, group
        self._source, self._target = source, target
        self._dtype, self._device = dtype, device
        self._debug = os.environ.get("RLHF_MEGATRON_DEBUG") == "1"
        ranks = dist.get_process_group_ranks(group)
        mine = plan.by_rank.get(rank)
        self._copies = mine.copies if mine else []
        empty: list[list[Transfer]] = [[] for _ in range(plan.num_buckets)]
        self._exchanges = [
            _exchange(sends, receives=receives, ranks=ranks, itemsize_bytes=plan.itemsize_bytes)
            for sends, receives in zip(
                mine.sends if mine else empty, mine.receives if mine else empty, strict=True
            )
        ]
        self._send_buffer: Tensor | None = None
        self._receive_buffer: Tensor | None = None

    @torch.no_grad()
    def run(self) -> ReshardStats:
        """Bring the target's parameters up to date."""
        self._synchronize()
        start = time.perf_counter()
        source, target = _look_up(self._source), _look_up(self._target)
        for copy in self._copies:
            # Through `dtype` as a transfer would go, so that replicas are equal bit for bit.
            value = source[copy.source_parameter][copy.source_region].to(self._dtype)
            target[copy.target_parameter][copy.target_region].copy_(value)
        received = sum(
            self._run_exchange(exchange, number=number, source=source, target=target)
            for number, exchange in enumerate(self._exchanges)
        )
        self._synchronize()
        return ReshardStats(
            bytes_received=received,
            bytes_minimum=self._plan.minimum_bytes.get(self._rank, 0),
            seconds=time.perf_counter() - start,
            num_operations=len(self._exchanges),
        )

    def release_buffers(self) -> None:
        """Give the buffers' memory back; the next run allocates them again."""
        self._send_buffer = self._receive_buffer = None

    def _run_exchange(
        self,
        exchange: _Exchange,
        *,
        number: int,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
    ) -> int:
        start = time.perf_counter()
        outgoing, incoming = self._buffers(exchange)
        offset = 0
        for transfer in exchange.sends:
            value = source[transfer.source_parameter][transfer.source_region]
            offset = self._slot(outgoing, transfer, offset=offset, fill=value)
        dist.all_to_all_single(
            incoming,
            outgoing,
            output_split_sizes=exchange.receive_bytes,
            input_split_sizes=exchange.send_bytes,
            group=self._group,
        )
        offset = 0
        for transfer in exchange.receives:
            place = target[transfer.target_parameter][transfer.target_region]
            offset = self._slot(incoming, transfer, offset=offset, empty_into=place)
        if self._debug:
            self._synchronize()
            logger.info(
                "reshard all_to_all_single bucket %d of %d: rank %d sent shape [%d], as many bytes,"
                " in %d transfers, received shape [%d] in %d, %.3f ms",
                number + 1,
                len(self._exchanges),
                self._rank,
                outgoing.numel(),
                len(exchange.sends),
                incoming.numel(),
                len(exchange.receives),
                1e3 * (time.perf_counter() - start),
            )
        return offset

    def _slot(
        self,
        buffer: Tensor,
        transfer: Transfer,
        *,
        offset: int,
        fill: Tensor | None = None,
        empty_into: Tensor | None = None,
    ) -> int:
        """Copy into or out of a transfer's place in the buffer; returns the next offset."""
        stop = offset + transfer.box.numel * self._plan.itemsize_bytes
        slot = buffer[offset:stop].view(self._dtype).view(transfer.box.shape)
        if fill is not None:
            slot.copy_(fill)
        if empty_into is not None:
            empty_into.copy_(slot)
        return stop

    def _buffers(self, exchange: _Exchange) -> tuple[Tensor, Tensor]:
        """Views of the two buffers, allocated at the largest bucket's size on first use."""
        if self._send_buffer is None or self._receive_buffer is None:
            sizes = (
                max(sum(e.send_bytes) for e in self._exchanges),
                max(sum(e.receive_bytes) for e in self._exchanges),
            )
            self._send_buffer, self._receive_buffer = (
                torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes
            )
        return (
            self._send_buffer[: sum(exchange.send_bytes)],
            self._receive_buffer[: sum(exchange.receive_bytes)],
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _look_up(tensors: Tensors) -> Mapping[str, Tensor]:
    return tensors() if callable(tensors) else tensors


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
        sends=sorted(sends, key=lambda transfer: position[transfer.dst]),
        receives=sorted(receives, key=lambda transfer: position[transfer.src]),
        send_bytes=send_bytes,
        receive_bytes=receive_bytes,
    )
