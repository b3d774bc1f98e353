"""The plan: every phase's bytes on every kind of rank, and a node's host memory.

plan = plan_memory(config, models=RoleModels(actor=..., critic=..., ref=...), machine=machine)
plan.peak.phase, plan.fits, plan.ranks[0].phases
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_megatron.config import Config
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.tensors import Head
from rlhf_megatron.memory.activations import Kernels
from rlhf_megatron.memory.rank import PhaseMemory, RankBuilder, RankMemory
from rlhf_megatron.memory.roles import RoleSetting, role_memory
from rlhf_megatron.memory.rollout import EngineMemory, engine_memory, itemsize_of
from rlhf_megatron.memory.switches import RecomputeChoice, offload_of, recompute_of
from rlhf_megatron.memory.sync import transfer_buffers
from rlhf_megatron.memory.training import BatchSizes
from rlhf_megatron.models.config import ReferenceConfig
from rlhf_megatron.resolve import parallel_layout, rollout_ranks
from rlhf_megatron.shared_backbone import actor_head


@dataclass(frozen=True, kw_only=True)
class RoleModels:
    """The roles' models. `critic` None: it is a head on the actor. `ref` None: there is no KL
    penalty. `reward` None: a function scores."""

    actor: ModelArchitecture
    critic: ModelArchitecture | None
    ref: ModelArchitecture | None
    reward: ModelArchitecture | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where the run would go."""

    world_size: int
    gpu_memory_bytes: int | None
    """Of one GPU; None on a CPU."""
    gpus_per_node: int = 8
    host_memory_bytes: int | None = None
    """Of a node, where known."""

    @property
    def is_gpu(self) -> bool:
        return self.gpu_memory_bytes is not None


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The whole plan."""

    machine: Machine
    ranks: tuple[RankMemory, ...]
    engine: EngineMemory
    batch: Mapping[str, BatchSizes]
    """By role: the largest micro-batch that it runs."""
    lora_rank: int
    node_host_bytes: int
    """Of the node with the most."""

    @property
    def worst(self) -> RankMemory:
        """The ranks with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak.total)

    @property
    def peak(self) -> PhaseMemory:
        return self.worst.peak

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it does not fit; empty where it does."""
        found = [self.engine.problem] if self.engine.problem else []
        limit, host = self.machine.gpu_memory_bytes, self.machine.host_memory_bytes
        if limit is not None and self.peak.total > limit:
            found.append(
                f"{self.peak.phase} needs {self.peak.total / 1e9:.1f} GB of a GPU that has "
                f"{limit / 1e9:.1f}"
            )
        if host is not None and self.node_host_bytes > host:
            found.append(
                f"a node needs {self.node_host_bytes / 1e9:.0f} GB of host memory and has "
                f"{host / 1e9:.0f}"
            )
        return tuple(found)

    @property
    def fits(self) -> bool:
        return not self.problems


def plan_memory(
    config: Config, *, models: RoleModels, machine: Machine, lora_rank: int = 0
) -> MemoryPlan:
    """Plan a valid configuration (validation.validate, validation_model.validate_model).

    `lora_rank` above 0 plans actor and critic with adapters in place of training all weights, which
    the trainer cannot do yet.
    """
    settings = role_settings(
        config, models=models, world_size=machine.world_size, lora_rank=lora_rank
    )
    engine = engine_memory(
        config,
        arch=models.actor,
        world_size=machine.world_size,
        gpu_memory_bytes=machine.gpu_memory_bytes,
    )
    batch = {s.name: batch_sizes(config, setting=s) for s in settings}
    classes = _rank_classes(settings, world_size=machine.world_size)
    buffers = _sync_buffers(
        config, models=models, settings=settings, machine=machine,
        listed=tuple(ranks[0] for ranks in classes.values()),
    )  # fmt: skip
    rolling = frozenset(rollout_ranks(config, world_size=machine.world_size))
    groups = _num_communicators(settings, config=config)
    planned = []
    for ranks in classes.values():
        builder = RankBuilder(
            config,
            is_gpu=machine.is_gpu,
            roles=[
                role_memory(
                    s,
                    rank=ranks[0],
                    kernels=_kernels(s, machine=machine),
                    on_gpu=machine.is_gpu,
                )
                for s in settings
                if ranks[0] in s.layout.ranks
            ],
            reward=models.reward if ranks[0] in _reward_ranks(config, machine=machine) else None,
            engine=engine if ranks[0] in rolling else None,
            batch=batch,
            sync_buffers=buffers.get(ranks[0], 0),
            num_communicators=groups,
        )
        planned.append(builder.planned(ranks))
    return MemoryPlan(
        machine=machine,
        ranks=tuple(planned),
        engine=engine,
        batch=batch,
        lora_rank=lora_rank,
        node_host_bytes=_largest_node(planned, gpus_per_node=machine.gpus_per_node),
    )


def role_settings(
    config: Config, *, models: RoleModels, world_size: int, lora_rank: int = 0
) -> list[RoleSetting]:
    """The roles that are Megatron models. With adapters the reference is the actor's own model."""
    found = []
    for name, role, arch in (
        ("actor", config.actor, models.actor),
        ("critic", config.critic, models.critic),
        ("ref", config.ref, models.ref),
    ):
        if arch is None or (name == "ref" and lora_rank and not config.ref.model):
            continue
        is_trained = name != "ref"
        heads: dict[str, Head] = {"actor": actor_head(config), "critic": "value", "ref": "lm"}
        found.append(
            RoleSetting(
                name=name,
                arch=arch,
                layout=parallel_layout(role.parallel, world_size=world_size),
                head=heads[name],
                precision=role.precision,
                is_trained=is_trained,
                recompute=RecomputeChoice()
                if isinstance(role, ReferenceConfig)
                else recompute_of(role),
                offload=offload_of(role),
                lora_rank=lora_rank if is_trained else 0,
            )
        )
    return found


def batch_sizes(config: Config, *, setting: RoleSetting) -> BatchSizes:
    """The largest micro-batch: the token budget, filled; or one longest sequence where that is
    more. Every token but one of a sequence may be of the response."""
    ppo, rollout = config.ppo, config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    replicas = setting.layout.data_parallel_size
    samples = rollout.prompts_per_step * rollout.responses_per_prompt
    mini_samples = -(-ppo.mini_batch_samples // replicas)
    mini = mini_samples * longest
    micro = min(ppo.micro_batch_tokens, mini)
    if ppo.micro_batch_samples:
        micro = min(micro, ppo.micro_batch_samples * longest)
    micro = max(micro, longest)
    return BatchSizes(
        micro_tokens=micro,
        micro_response_tokens=micro,
        mini_micro_batches=-(-mini // micro),
        mini_tokens=mini,
        step_tokens=-(-samples // replicas) * longest,
    )


def _kernels(setting: RoleSetting, *, machine: Machine) -> Kernels:
    return "flash" if machine.is_gpu and setting.precision == "bf16" else "composite"


def _rank_classes(
    settings: list[RoleSetting], *, world_size: int
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Ranks by their stage in each role (-1: not of it). The first of a class is of the first
    replica, which has the largest share of a padded buffer."""
    stages = []
    for setting in settings:
        layout = setting.layout
        of = {
            layout.rank(tp=tp, dp=dp, pp=pp): pp
            for tp in range(layout.tensor_model_parallel_size)
            for dp in range(layout.data_parallel_size)
            for pp in range(layout.pipeline_model_parallel_size)
        }
        stages.append(of)
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size):
        found.setdefault(tuple(of.get(rank, -1) for of in stages), []).append(rank)
    return {key: tuple(ranks) for key, ranks in found.items()}


def _sync_buffers(
    config: Config,
    *,
    models: RoleModels,
    settings: list[RoleSetting],
    machine: Machine,
    listed: tuple[int, ...],
) -> dict[int, int]:
    text = config.rollout.engines
    engines = None
    if text != "auto":
        engines = tuple(tuple(int(rank) for rank in part.split(",")) for part in text.split(";"))
    bucket_bytes = int(config.reshard.bucket_mb * 1e6)
    if config.rollout.weight_update == "reload":
        return dict.fromkeys(listed, 2 * bucket_bytes)
    return transfer_buffers(
        models.actor,
        actor=settings[0].layout,
        ranks=rollout_ranks(config, world_size=machine.world_size),
        engine_size=config.rollout.tensor_parallel_size,
        engines=engines,
        whole_models=config.rollout.engine == "hf",
        itemsize=itemsize_of(config.actor.precision),
        bucket_bytes=bucket_bytes,
        gpus_per_node=machine.gpus_per_node,
        listed=listed,
        on_gpu=machine.is_gpu,
    )


def _num_communicators(settings: list[RoleSetting], *, config: Config) -> int:
    """Groups of several ranks that a rank is in: of the job, of each different layout, and of its
    engine."""
    layouts = {setting.layout for setting in settings}
    count = sum(
        size > 1
        for layout in layouts
        for size in (
            layout.tensor_model_parallel_size,
            layout.pipeline_model_parallel_size,
            layout.data_parallel_size,
        )
    )
    is_job = any(len(layout.ranks) > 1 for layout in layouts)
    return count + is_job + (config.rollout.tensor_parallel_size > 1)


def _reward_ranks(config: Config, *, machine: Machine) -> frozenset[int]:
    if not config.reward.model:
        return frozenset()
    layout = parallel_layout(config.reward.parallel, world_size=machine.world_size)
    return frozenset(layout.ranks)


def _largest_node(ranks: list[RankMemory], *, gpus_per_node: int) -> int:
    nodes: dict[int, int] = {}
    for group in ranks:
        for rank in group.ranks:
            node = rank // gpus_per_node
            nodes[node] = nodes.get(node, 0) + group.host.total
    return max(nodes.values())
