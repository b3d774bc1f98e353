"""A Megatron actor on the ranks of a test or benchmark, its engine, and the sync between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from tiny_models import make_model

from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.rollout.config import RolloutConfig

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Synced:
    """One rank's part: `actor` and `engine` are None where it has none."""

    actor: Any
    engine: Any
    sync: Any
    arch: Any
    layouts: Any  # of the actor's ranks

    def write_actor(self, rank: int, *, kind: str, seed: int) -> None:
        """Give the actor the weights of `make_model(kind, seed)`."""
        if self.actor is None:
            return
        state = make_model(kind, seed=seed).state_dict()
        parameters = self.actor.parameters()
        with torch.no_grad():
            for place in self.layouts[rank]:
                value = state[place.tensor][place.box.slices()]
                parameters[place.parameter][place.region(place.box)] = value


def new_factory() -> Any:
    """Makes the roles' groups; on a CPU, as the trainer starts."""
    from rlhf_megatron.distributed.cpu_platform import use_cpu_in_place_of_cuda

    use_cpu_in_place_of_cuda()
    from rlhf_megatron.distributed.groups import GroupFactory

    return GroupFactory(timeout_seconds=60)


def build_synced(
    rank: int,
    *,
    directory: Path,
    layout: ParallelLayout,
    engines: Sequence[tuple[int, ...]],
    engine_groups: Sequence[Any],
    factory: Any,
    config: RolloutConfig,
    max_model_len: int = 128,
    bucket_mb: float = 0.1,
    verify: str = "always",
) -> Synced:
    """Collective over the job. `engine_groups`: of `make_engine_groups(engines)`."""
    from rlhf_megatron.distributed.groups import build_role_groups
    from rlhf_megatron.layout.megatron import megatron_layouts
    from rlhf_megatron.layout.vllm import vllm_layouts
    from rlhf_megatron.models.build import build_model
    from rlhf_megatron.placed_role import PlacedRole
    from rlhf_megatron.reshard.config import ReshardConfig
    from rlhf_megatron.rollout.factory import build_engine, resolve_engine
    from rlhf_megatron.rollout.vllm_fit import level_group_count
    from rlhf_megatron.weight_sync import WeightSync

    arch = read_architecture(directory)
    groups = build_role_groups("actor", layout=layout, factory=factory)
    actor = None
    if groups is not None:
        actor = build_model(
            arch,
            head="lm",
            groups=groups,
            precision="fp32",
            layer_spec_name="local",
            device=CPU,
            seed=1,
        )
    resolve_engine("vllm", device=CPU)
    engine = None
    for replica, (ranks, group) in enumerate(zip(engines, engine_groups, strict=True)):
        if rank in ranks:
            engine = build_engine(
                "vllm",
                model_dir=directory,
                ranks=ranks,
                replica=replica,
                group=group,
                config=config,
                dtype="float32",
                run_seed=5,
                max_model_len=max_model_len,
                device=CPU,
            )
    level_group_count()
    layouts = megatron_layouts(arch, parallel=layout, head="lm", fused_norms=False)
    role: Any = SimpleNamespace(model=actor) if actor is not None else None
    sync = WeightSync(
        PlacedRole(
            name="actor",
            arch=arch,
            head="lm",
            layout=layout,
            dtype=torch.float32,
            fused_norms=False,
            engine=role,
        ),
        engine=engine,
        engine_layouts=vllm_layouts(arch, engines=engines),
        config=ReshardConfig(bucket_mb=bucket_mb, verify=verify),
        rank=rank,
        group=dist.group.WORLD,
        device=CPU,
        node_of=lambda _: 0,
    )
    return Synced(actor=actor, engine=engine, sync=sync, arch=arch, layouts=layouts)
