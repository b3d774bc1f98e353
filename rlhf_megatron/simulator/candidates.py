"""The placements that a search tries, and the cheap bounds that spare most of them the planner."""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace

from rlhf_megatron.config import Config
from rlhf_megatron.distributed.config import ParallelConfig
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.memory.parameters import FP32_BYTES, optimizer_bytes_per_element
from rlhf_megatron.memory.plan import RoleModels
from rlhf_megatron.memory.rollout import itemsize_of
from rlhf_megatron.simulator.cluster import Cluster
from rlhf_megatron.simulator.costs import parameters_of
from rlhf_megatron.validation_model import broken_training_rules

MOST_STAGES = 20
LARGEST_NODE = 64
ENGINE_BYTES = 4e9
"""Beside its weights: workspace, graphs, the least KV cache. Of a bound, so rather too little."""
OTHER_BYTES = 3e9
"""Contexts, communicators and the activations of a pass, at least."""
UTILIZATION_STEP = 0.05
MOST_UTILIZATION = 0.9


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One placement. Sizes are (tensor, pipeline)."""

    actor: tuple[int, int]
    critic: tuple[int, int]
    critic_ranks: int
    """The last ones of the job; 0: the critic is on all ranks, as all roles are."""
    ref_with_critic: bool
    ref: tuple[int, int]
    """The actor's on the actor's ranks; on the critic's as many stages as there can be."""
    engine_size: int
    depth: int
    offloads: bool
    """Optimizer and gradients of actor and critic, outside their updates."""
    utilization: float
    """rollout.gpu_memory_utilization, what the resident weights leave."""

    @property
    def kind(self) -> str:
        """What it is compared by."""
        if not self.critic_ranks:
            return "all roles on all ranks"
        ref = "critic and reference" if self.ref_with_critic else "critic"
        return f"{ref} on ranks of their own, pipeline.depth {self.depth}"


def candidates(
    config: Config, *, models: RoleModels, cluster: Cluster, world_size: int
) -> Iterator[Candidate]:
    """All that divide evenly, before any look at memory (utilization 0)."""
    assert models.critic is not None  # make_setup refuses a shared backbone
    nodes = max(1, world_size // cluster.ranks_per_node)
    splits = [n * cluster.ranks_per_node for n in _node_counts(nodes)]
    has_ref = models.ref is not None
    for critic_ranks in (0, *splits):
        own = critic_ranks or world_size
        others = world_size - critic_ranks
        for actor in layouts(models.actor, num_ranks=others, cluster=cluster):
            for critic in layouts(models.critic, num_ranks=own, cluster=cluster):
                for size in _tensor_sizes(models.actor, num_ranks=others, cluster=cluster):
                    for ref_with_critic in (False, True) if critic_ranks and has_ref else (False,):
                        for depth in (0, 1) if critic_ranks else (0,):
                            for offloads in (False, True):
                                yield Candidate(
                                    actor=actor,
                                    critic=critic,
                                    critic_ranks=critic_ranks,
                                    ref_with_critic=ref_with_critic,
                                    ref=_on_ranks(models.actor, tensor=actor[0], num_ranks=own)
                                    if ref_with_critic
                                    else actor,
                                    engine_size=size,
                                    depth=depth,
                                    offloads=offloads,
                                    utilization=0.0,
                                )


def layouts(arch: ModelArchitecture, *, num_ranks: int, cluster: Cluster) -> list[tuple[int, int]]:
    """(tensor, pipeline) that divide the model and the ranks."""
    stages = [n for n in range(1, MOST_STAGES + 1) if arch.num_layers % n == 0]
    return [
        (tensor, pipeline)
        for tensor in _tensor_sizes(arch, num_ranks=num_ranks, cluster=cluster)
        for pipeline in stages
        if num_ranks % (tensor * pipeline) == 0
    ]


def fitted(
    candidate: Candidate, *, config: Config, models: RoleModels, cluster: Cluster, world_size: int
) -> Candidate | None:
    """The candidate with the share of the GPU that its engine can have; None where weights,
    gradients and optimizer alone leave it, or themselves, no room."""
    if cluster.memory_gb is None:
        return replace(candidate, utilization=config.rollout.gpu_memory_utilization)
    assert models.critic is not None
    memory = cluster.memory_gb * 1e9
    own = candidate.critic_ranks or world_size
    actor = _trained_bytes(
        models.actor, config=config, sizes=candidate.actor,
        num_ranks=world_size - candidate.critic_ranks, head="lm", offloads=candidate.offloads,
    )  # fmt: skip
    critic = _trained_bytes(
        models.critic, config=config, sizes=candidate.critic,
        num_ranks=own, head="value", offloads=candidate.offloads,
    )  # fmt: skip
    ref = 0.0
    if models.ref is not None:
        size = parameters_of(models.ref, head="lm") * itemsize_of(config.ref.precision)
        ref = size / (candidate.ref[0] * candidate.ref[1])
    ref_always = 0.0 if config.ref.offload else ref
    if candidate.critic_ranks:
        beside_engine = actor.resident + (0 if candidate.ref_with_critic else ref_always)
        fullest = max(actor.training, critic.training + ref_always * candidate.ref_with_critic)
    else:
        beside_engine = actor.resident + critic.resident + ref_always
        fullest = ref_always + max(
            actor.training + critic.resident, critic.training + actor.resident
        )
    if fullest + OTHER_BYTES > memory:
        return None
    weights = parameters_of(models.actor, head="lm") * itemsize_of(config.actor.precision)
    free = memory - beside_engine - OTHER_BYTES
    steps = int(min(free / memory, MOST_UTILIZATION) / UTILIZATION_STEP)
    utilization = round(steps * UTILIZATION_STEP, 2)
    if utilization * memory < weights / candidate.engine_size + ENGINE_BYTES:
        return None
    return replace(candidate, utilization=utilization)


@dataclass(frozen=True, kw_only=True)
class _Bytes:
    resident: float
    """Always on the GPU."""
    training: float
    """In the role's own update."""


def _trained_bytes(
    arch: ModelArchitecture,
    *,
    config: Config,
    sizes: tuple[int, int],
    num_ranks: int,
    head: str,
    offloads: bool,
) -> _Bytes:
    role = config.actor if head == "lm" else config.critic
    parameters = parameters_of(arch, head=head) / (sizes[0] * sizes[1])  # type: ignore[arg-type]
    replicas = num_ranks // (sizes[0] * sizes[1])
    weights = parameters * itemsize_of(role.precision)
    gradients = parameters * FP32_BYTES
    optimizer = parameters / replicas * optimizer_bytes_per_element(role.precision)
    resident = 0.0 if role.offload_weights else weights
    resident += 0.0 if role.offload_gradients or offloads else gradients
    resident += 0.0 if role.offload_optimizer or offloads else optimizer
    return _Bytes(resident=resident, training=weights + gradients + optimizer)


def apply(candidate: Candidate, *, config: Config, world_size: int) -> Config:
    """A copy of the configuration with the candidate's placement; parts that it does not touch are
    shared with it."""
    found = copy(config)
    found.placement = []  # its ranks are the roles' own from here on
    others = world_size - candidate.critic_ranks
    actor_ranks = f"0-{others - 1}" if candidate.critic_ranks else "all"
    critic_ranks = f"{others}-{world_size - 1}" if candidate.critic_ranks else "all"
    for name, sizes, ranks in (
        ("actor", candidate.actor, actor_ranks),
        ("critic", candidate.critic, critic_ranks),
        ("ref", candidate.ref, critic_ranks if candidate.ref_with_critic else actor_ranks),
    ):
        role = copy(getattr(config, name))
        role.parallel = _parallel(role.parallel, sizes=sizes, ranks=ranks)
        if candidate.offloads and name != "ref":
            role.offload_optimizer = role.offload_gradients = True
        setattr(found, name, role)
    found.rollout = copy(config.rollout)
    found.rollout.ranks = "all"
    found.rollout.tensor_parallel_size = candidate.engine_size
    found.rollout.gpu_memory_utilization = candidate.utilization
    return found


def overrides(candidate: Candidate, *, config: Config, world_size: int) -> list[str]:
    """The candidate as words of the command line."""
    found = []
    placed = apply(candidate, config=config, world_size=world_size)
    for name in ("actor", "critic", "ref"):
        parallel: ParallelConfig = getattr(placed, name).parallel
        at = f"{name}.parallel"
        found.append(f"{at}.tensor_model_parallel_size={parallel.tensor_model_parallel_size}")
        found.append(f"{at}.pipeline_model_parallel_size={parallel.pipeline_model_parallel_size}")
        found.append(f"{at}.sequence_parallel={str(parallel.sequence_parallel).lower()}")
        if candidate.offloads and name != "ref":
            found += [f"{name}.offload_optimizer=true", f"{name}.offload_gradients=true"]
    if candidate.critic_ranks:
        others = world_size - candidate.critic_ranks
        with_actor = ["actor", "rollout", *(() if candidate.ref_with_critic else ("ref",))]
        with_critic = ["critic", *(("ref",) if candidate.ref_with_critic else ())]
        found.append(
            f"placement=[{{ranks: 0-{others - 1}, roles: [{', '.join(with_actor)}]}}, "
            f"{{ranks: {others}-{world_size - 1}, roles: [{', '.join(with_critic)}]}}]"
        )
    if candidate.depth:
        found += [f"pipeline.depth={candidate.depth}", "ppo.importance_sampling.cap=2"]
    found.append(f"rollout.tensor_parallel_size={candidate.engine_size}")
    found.append(f"rollout.gpu_memory_utilization={candidate.utilization}")
    return found


def _parallel(parallel: ParallelConfig, *, sizes: tuple[int, int], ranks: str) -> ParallelConfig:
    return replace(
        parallel,
        tensor_model_parallel_size=sizes[0],
        pipeline_model_parallel_size=sizes[1],
        virtual_pipeline_model_parallel_size=1,
        data_parallel_size=0,
        sequence_parallel=sizes[0] > 1,
        ranks=ranks,
    )


def _on_ranks(arch: ModelArchitecture, *, tensor: int, num_ranks: int) -> tuple[int, int]:
    """(tensor, pipeline) with as many stages as divide both the layers and the ranks."""
    rest = num_ranks // tensor
    return tensor, max(n for n in range(1, rest + 1) if rest % n == 0 and arch.num_layers % n == 0)


def _tensor_sizes(arch: ModelArchitecture, *, num_ranks: int, cluster: Cluster) -> list[int]:
    """Powers of 2 within a node that cut the model."""
    sizes = [2**k for k in range(LARGEST_NODE.bit_length()) if 2**k <= cluster.ranks_per_node]
    return [
        size
        for size in sizes
        if num_ranks % size == 0 and not broken_training_rules(size, model=arch)
    ]


def _node_counts(nodes: int) -> list[int]:
    """Of the critic's share: powers of 2 and their halves again, up to half of the nodes."""
    found = {n for k in range(nodes.bit_length()) for n in (2**k, 3 * 2**k)}
    return sorted(n for n in found if n <= nodes // 2)
