"""Weights on their way between layouts: actor to engines before each rollout, and role to role."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.tensors import logical_tensors
from rlhf_megatron.placed_role import PlacedRole
from rlhf_megatron.reshard.config import ReshardConfig
from rlhf_megatron.reshard.execute import Resharder, ReshardStats
from rlhf_megatron.reshard.plan import BUCKETS_IN_FLIGHT, make_plan
from rlhf_megatron.reshard.verify import verify_reshard
from rlhf_megatron.rollout.contract import RolloutEngine
from rlhf_megatron.weight_reload import ReloadStats, ReloadSync, restricted

Layouts = Mapping[int, RankLayout]


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


class WeightSync:
    """Writes the actor's weights into the engines' parameters, in place."""

    def __init__(
        self,
        actor: PlacedRole,
        *,
        engine: RolloutEngine | None,
        engine_layouts: Layouts,
        config: ReshardConfig,
        rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        node_of: Callable[[int], int],
    ) -> None:
        """`engine` is this rank's, None where it has none; `engine_layouts` are those of all
        rollout ranks. Collective over `group`, as `run` is: the ranks of actor and engines, or more
        of the job's."""
        self._actor, self._engine, dtype = actor, engine, actor.dtype
        tensors = logical_tensors(actor.arch, head="lm")
        # A value head beside the output layer is no business of the engines.
        self._source = restricted(actor.layouts, names={t.name for t in tensors})
        self._target = dict(engine_layouts)
        self._shapes = {t.name: t.shape for t in tensors}
        self._dtype, self._config = dtype, config
        self._rank, self._group, self._device = rank, group, device
        self._num_syncs = 0
        self._reload: ReloadSync | None = None
        self.reload_reason = self._agree_on_reload_reason()
        """Why the weights go through the engines' own reload; empty where they do not."""
        bucket_bytes = int(config.bucket_mb * 1e6)
        if self.reload_reason:
            self._reload = ReloadSync(
                source=self._source,
                tensors=tensors,
                rollout_ranks=sorted(self._target),
                actor_parameters=self._actor.parameters,
                dtype=dtype,
                bucket_bytes=bucket_bytes,
                rank=rank,
                group=group,
                device=device,
                node_of=node_of,
            )
            return
        plan = make_plan(
            self._source,
            self._target,
            itemsize_bytes=dtype.itemsize,
            bucket_bytes=bucket_bytes // BUCKETS_IN_FLIGHT,
            node_of=node_of,
            ranks=[rank],
        )
        self._resharder = Resharder(
            plan,
            rank=rank,
            group=group,
            source=self._actor.parameters,
            target=self._engine_parameters,
            dtype=dtype,
            device=device,
        )

    def _agree_on_reload_reason(self) -> str:
        """The same for all engines: the first that has one."""
        own = self._engine.reload_reason if self._engine is not None else ""
        reasons: list[str] = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(reasons, own, group=self._group)
        reason = next((text for text in reasons if text), "")
        missing = self._engine is not None and not own
        assert not (reason and missing), f"engines differ in how they take weights: {reason}"
        return reason

    def __str__(self) -> str:
        if self.reload_reason:
            return (
                "weight sync: through the engine's own reload, each tensor whole on every rollout "
                f"rank: {self.reload_reason}"
            )
        return (
            f"weight sync: in place, {len(self._shapes)} tensors cover every parameter of the "
            "engines"
        )

    def run(self, *, version: int) -> SyncReport:
        """Bring every engine to the actor's present weights, which become `version`."""
        verify = self._config.verify
        is_verified = verify == "always" or (verify == "first" and self._num_syncs == 0)
        stats: ReshardStats | ReloadStats
        if self._reload is not None:
            stats = self._reload.run(self._engine, verify=is_verified)
        else:
            stats = self._resharder.run()
            self._resharder.release_buffers()
            if is_verified:
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

    def _engine_parameters(self) -> dict[str, Tensor]:
        return self._engine.parameters() if self._engine is not None else {}

    def _verify(self) -> None:
        verify_reshard(
            self._source,
            self._target,
            rank=self._rank,
            group=self._group,
            source=self._actor.parameters(),
            target=self._engine_parameters(),
            shapes=self._shapes,
            dtype=self._dtype,
            device=self._device,
        )


def copy_weights(
    source: PlacedRole,
    *,
    target: PlacedRole,
    rank: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """Give one role the weights of another, whatever their layouts and ranks. Collective over
    `group`, which has the ranks of both.

    A value head, which a language model does not have, keeps what it holds.
    """
    held = {t.name for t in logical_tensors(source.arch, head=source.head)}
    plan = make_plan(
        source.layouts,
        restricted(target.layouts, names=held),
        itemsize_bytes=target.dtype.itemsize,
        bucket_bytes=256_000_000 // BUCKETS_IN_FLIGHT,
        ranks=[rank],
    )
    Resharder(
        plan,
        rank=rank,
        group=group,
        source=source.parameters,
        target=target.parameters,
        dtype=target.dtype,
        device=device,
    ).run()
