"""Two other ways to bring training weights into a rollout layout, for benchmarks/reshard.py."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.resharding.copy_services.base import CopyService
from torch import Tensor

from rlhf_megatron.distributed.groups import RoleGroups
from rlhf_megatron.layout.boxes import Box, Placement, RankLayout
from rlhf_megatron.layout.parallel import ParallelLayout


@dataclass(frozen=True)
class _Part:
    """Whole rows of one parameter; its place in a bucket, in elements."""

    parameter: str
    box: Box
    offset: int


@dataclass(frozen=True)
class _Bucket:
    """Parts of the parameters of one pipeline stage."""

    owner: int
    """The global rank in this rank's pipeline group that has them."""
    is_mine: bool
    parts: list[_Part]
    numel: int
    slices: list["_Slice"]


@dataclass(frozen=True)
class _Slice:
    """What the target takes of what one tensor-parallel rank had of a part."""

    tp_rank: int
    part: _Part
    region: tuple[slice, ...]
    target_parameter: str
    target_region: tuple[slice, ...]


class GatherSync:
    """What trainers without a plan do, bucketed: each pipeline stage's shard is broadcast to the
    other stages, gathered over the tensor-parallel group, and cut to what the engine wants.

    Every replica works by itself, so every rank sees the whole model. Buckets hold parameters of
    one stage up to `bucket_bytes`; the buffers are one bucket, and one for each tensor-parallel
    rank.
    """

    def __init__(
        self,
        groups: RoleGroups,
        *,
        source_layouts: Mapping[int, RankLayout],
        target_layout: RankLayout,
        source: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: int,
    ) -> None:
        self._tp, self._pp = groups.collection.tp, groups.collection.pp
        self._source, self._target = source, target
        layout, at = groups.layout, groups.coordinates
        wanted: dict[str, list[Placement]] = {}
        for placement in target_layout:
            wanted.setdefault(placement.tensor, []).append(placement)
        self._buckets: list[_Bucket] = []
        for stage in range(layout.pipeline_model_parallel_size):
            owner = layout.rank(tp=at.tp, dp=at.dp, pp=stage)
            shards = _tensor_parallel_shards(layout, source_layouts, dp=at.dp, stage=stage)
            for parts in _pack(_shapes(shards), elements=bucket_bytes // dtype.itemsize):
                self._buckets.append(
                    _Bucket(
                        owner=owner,
                        is_mine=stage == at.pp,
                        parts=parts,
                        numel=parts[-1].offset + parts[-1].box.numel,
                        slices=list(_slices(parts, shards=shards, wanted=wanted)),
                    )
                )
        self._tp_size = layout.tensor_model_parallel_size
        largest = max(bucket.numel for bucket in self._buckets)
        self._local = torch.empty(largest, dtype=dtype, device=device)
        self._whole = torch.empty(largest * self._tp_size, dtype=dtype, device=device)

    @torch.no_grad()
    def run(self) -> int:
        """Sync once; returns the bytes that this rank received."""
        received = 0
        for bucket in self._buckets:
            local = self._local[: bucket.numel]
            if bucket.is_mine:
                for part in bucket.parts:
                    value = self._source[part.parameter][part.box.slices()]
                    _of(local, part).copy_(value)
            if dist.get_world_size(self._pp) > 1:
                dist.broadcast(local.view(torch.uint8), src=bucket.owner, group=self._pp)
                received += 0 if bucket.is_mine else local.numel() * local.element_size()
            whole = local
            if self._tp_size > 1:
                whole = self._whole[: bucket.numel * self._tp_size]
                dist.all_gather_into_tensor(
                    whole.view(torch.uint8), local.view(torch.uint8), group=self._tp
                )
                received += (self._tp_size - 1) * local.numel() * local.element_size()
            shares = whole.split(bucket.numel)
            for piece in bucket.slices:
                value = _of(shares[piece.tp_rank], piece.part)[piece.region]
                self._target[piece.target_parameter][piece.target_region].copy_(value)
        return received


def _of(bucket: Tensor, part: _Part) -> Tensor:
    return bucket[part.offset : part.offset + part.box.numel].view(part.box.shape)


def _tensor_parallel_shards(
    layout: ParallelLayout, source: Mapping[int, RankLayout], *, dp: int, stage: int
) -> list[RankLayout]:
    ranks = range(layout.tensor_model_parallel_size)
    return [source[layout.rank(tp=tp, dp=dp, pp=stage)] for tp in ranks]


def _shapes(shards: list[RankLayout]) -> dict[str, tuple[int, ...]]:
    """Of each parameter, the largest over the tensor-parallel ranks."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layout in shards:
        for p in layout:
            stop = tuple(o + n for o, n in zip(p.offset, p.box.shape, strict=True))
            old = shapes.get(p.parameter, stop)
            shapes[p.parameter] = tuple(max(a, b) for a, b in zip(stop, old, strict=True))
    return shapes


def _pack(shapes: Mapping[str, tuple[int, ...]], *, elements: int) -> Iterator[list[_Part]]:
    parts: list[_Part] = []
    filled = 0
    for name, shape in shapes.items():
        row = prod(shape[1:])
        start = 0
        while start < shape[0]:
            if parts and filled + row > elements:
                yield parts
                parts, filled = [], 0
            count = min(shape[0] - start, max(1, (elements - filled) // row))
            box = Box((start, *(0 for _ in shape[1:])), (start + count, *shape[1:]))
            parts.append(_Part(name, box, filled))
            start, filled = start + count, filled + box.numel
    yield parts


def _slices(
    parts: list[_Part],
    *,
    shards: list[RankLayout],
    wanted: Mapping[str, list[Placement]],
) -> Iterator[_Slice]:
    """Where the shards' pieces go; what several shards hold is taken from the first."""
    by_name = [_by_parameter(layout) for layout in shards]
    for part in parts:
        taken: set[tuple[str, Box]] = set()
        for tp_rank, placements in enumerate(by_name):
            for held in placements.get(part.parameter, ()):
                lies_at = Box(
                    held.offset,
                    tuple(o + n for o, n in zip(held.offset, held.box.shape, strict=True)),
                )
                common = lies_at.intersect(part.box)
                if common is None:
                    continue
                shift = [s - o for s, o in zip(held.box.start, held.offset, strict=True)]
                logical = Box(
                    tuple(a + d for a, d in zip(common.start, shift, strict=True)),
                    tuple(b + d for b, d in zip(common.stop, shift, strict=True)),
                )
                for place in wanted.get(held.tensor, ()):
                    box = place.box.intersect(logical)
                    if box is None or (held.tensor, box) in taken:
                        continue
                    taken.add((held.tensor, box))
                    origin = tuple(p + d for p, d in zip(part.box.start, shift, strict=True))
                    yield _Slice(
                        tp_rank, part, box.slices(origin=origin), place.parameter, place.region(box)
                    )


def _by_parameter(layout: RankLayout) -> dict[str, list[Placement]]:
    found: dict[str, list[Placement]] = {}
    for placement in layout:
        found.setdefault(placement.parameter, []).append(placement)
    return found


class PointToPoint(CopyService):
    """Sends and receives for megatron.core.resharding, all at once, as its own services do, which
    need a GPU to be made. Counts what it receives from other ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sends: list[tuple[Any, Tensor, int]] = []
        self._receives: list[tuple[Any, Tensor, int]] = []
        self.bytes_received = 0

    def submit_send(self, src_tensor: Tensor, dest_rank: int, task_id: Any = None) -> None:
        self._sends.append((task_id, src_tensor, dest_rank))

    def submit_recv(self, dest_tensor: Tensor, src_rank: int, task_id: Any = None) -> None:
        self._receives.append((task_id, dest_tensor, src_rank))

    def submit_send_with_id(self, task_id: Any, src_tensor: Tensor, dest_rank: int) -> None:
        self.submit_send(src_tensor, dest_rank, task_id)

    def submit_recv_with_id(self, task_id: Any, dest_tensor: Tensor, src_rank: int) -> None:
        self.submit_recv(dest_tensor, src_rank, task_id)

    @torch.no_grad()
    def run(self) -> None:
        rank = dist.get_rank(self._group)
        own = {task: tensor for task, tensor, peer in self._sends if peer == rank}
        operations = [
            dist.P2POp(dist.isend, tensor, peer, group=self._group)
            for _, tensor, peer in self._sends
            if peer != rank
        ]
        for task, tensor, peer in self._receives:
            if peer == rank:
                tensor.copy_(own[task])
            else:
                operations.append(dist.P2POp(dist.irecv, tensor, peer, group=self._group))
                self.bytes_received += tensor.numel() * tensor.element_size()
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        self._sends, self._receives = [], []

    def close(self) -> None:
        """Nothing is held."""
