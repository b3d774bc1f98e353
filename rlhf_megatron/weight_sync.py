"""Weights on their way between layouts: actor to engines before each rollout, and role to role."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.megatron import megatron_layouts
from rlhf_megatron.layout.tensors import logical_tensors
from rlhf_megatron.models.build import RoleModel
from rlhf_megatron.reshard.config import ReshardConfig
from rlhf_megatron.reshard.execute import Resharder
from rlhf_megatron.reshard.plan import make_plan
from rlhf_megatron.reshard.verify import verify_reshard
from rlhf_megatron.rollout.contract import RolloutEngine

Layouts = Mapping[int, RankLayout]


def role_layouts(model: RoleModel) -> dict[int, RankLayout]:
    """Where the role's weights lie, on all its ranks; replicas share one layout object."""
    return megatron_layouts(
        model.arch, parallel=model.groups.layout, head=model.head, fused_norms=model.fused_norms
    )


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """One sync over all ranks."""

    bytes_received: int
    bytes_minimum: int
    own_bytes_received: int  # by this rank
    seconds: float  # of the slowest rank

    def metrics(self) -> dict[str, float]:
        return {
            "reshard/bytes_received": self.bytes_received,
            "reshard/bytes_minimum": self.bytes_minimum,
            "reshard/seconds": self.seconds,
        }


NO_SYNC = SyncReport(bytes_received=0, bytes_minimum=0, own_bytes_received=0, seconds=0.0)
"""Of a step that leaves the engines as they are."""


@dataclass(frozen=True, kw_only=True)
class SplitActor:
    """An actor on some of the ranks, as all ranks know it."""

    arch: ModelArchitecture
    layouts: Layouts
    """Of its ranks; replicas share one object."""


class WeightSync:
    """Writes the actor's weights into the engines' parameters, in place."""

    def __init__(
        self,
        actor: RoleModel | None,
        *,
        engine: RolloutEngine | None,
        engine_layouts: Layouts,
        dtype: torch.dtype,
        config: ReshardConfig,
        rank: int,
        job_group: dist.ProcessGroup,
        device: torch.device,
        node_of: Callable[[int], int],
        split: "SplitActor | None" = None,
    ) -> None:
        """`actor` and `engine` are this rank's, or None where it has no part in them;
        `engine_layouts` are those of all rollout ranks. `split` says what `actor` cannot where some
        ranks have none. Collective over `job_group`, as `run` is."""
        self._actor, self._engine = actor, engine
        if split is None:
            assert actor is not None, "a rank without an actor needs `split`"
            split = SplitActor(arch=actor.arch, layouts=role_layouts(actor))
        self._source, self._target = split.layouts, dict(engine_layouts)
        self._shapes = {t.name: t.shape for t in logical_tensors(split.arch, head="lm")}
        self._dtype, self._config = dtype, config
        self._rank, self._group, self._device = rank, job_group, device
        self._num_syncs = 0
        plan = make_plan(
            self._source,
            self._target,
            itemsize_bytes=dtype.itemsize,
            bucket_bytes=int(config.bucket_mb * 1e6),
            node_of=node_of,
            ranks=[rank],
        )
        self._resharder = Resharder(
            plan,
            rank=rank,
            group=job_group,
            source=self._actor_parameters,
            target=self._engine_parameters,
            dtype=dtype,
            device=device,
        )

    def run(self, *, version: int) -> SyncReport:
        """Bring every engine to the actor's present weights, which become `version`."""
        stats = self._resharder.run()
        self._resharder.release_buffers()
        verify = self._config.verify
        if verify == "always" or (verify == "first" and self._num_syncs == 0):
            self._verify()
        self._num_syncs += 1
        if self._engine is not None:
            self._engine.weights_written(version=version)
        totals = torch.tensor(
            [stats.bytes_received, stats.bytes_minimum], dtype=torch.int64, device=self._device
        )
        seconds = torch.tensor(stats.seconds, device=self._device)
        dist.all_reduce(totals, group=self._group)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self._group)
        received, minimum = totals.tolist()
        return SyncReport(
            bytes_received=received,
            bytes_minimum=minimum,
            own_bytes_received=stats.bytes_received,
            seconds=float(seconds.item()),
        )

    def _actor_parameters(self) -> dict[str, Tensor]:
        return self._actor.parameters() if self._actor is not None else {}

    def _engine_parameters(self) -> dict[str, Tensor]:
        return self._engine.parameters() if self._engine is not None else {}

    def _verify(self) -> None:
        verify_reshard(
            self._source,
            self._target,
            rank=self._rank,
            group=self._group,
            source=self._actor_parameters(),
            target=self._engine_parameters(),
            shapes=self._shapes,
            dtype=self._dtype,
            device=self._device,
        )


def copy_weights(
    source: RoleModel,
    *,
    target: RoleModel,
    rank: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Give one role the weights of another, whatever their layouts. Collective over `group`.

    A value head, which a language model does not have, keeps what it holds.
    """
    held = {t.name for t in logical_tensors(source.arch, head=source.head)}
    layouts = role_layouts(target)
    # Filtered once per layout object: the planner treats ranks that share one alike.
    shared = {
        id(layout): tuple(p for p in layout if p.tensor in held) for layout in layouts.values()
    }
    wanted = {r: shared[id(layout)] for r, layout in layouts.items()}
    dtype = target.config.params_dtype
    plan = make_plan(
        role_layouts(source),
        wanted,
        itemsize_bytes=dtype.itemsize,
        bucket_bytes=256_000_000,
        ranks=[rank],
    )
    Resharder(
        plan,
        rank=rank,
        group=group,
        source=source.parameters,
        target=target.parameters,
        dtype=dtype,
        device=device,
    ).run()
