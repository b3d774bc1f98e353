"""The best placement for a number of GPUs: try many, drop what does not fit, rank by samples/s.

All candidates are simulated that cheap bounds let through; the memory planner, which is exact and
takes a fraction of a second, then looks at the best ones only, until enough of them fit.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from rlhf_megatron.config import Config
from rlhf_megatron.errors import UserError
from rlhf_megatron.memory.plan import Machine, MemoryPlan, RoleModels, plan_memory
from rlhf_megatron.simulator.candidates import (
    UTILIZATION_STEP,
    Candidate,
    apply,
    candidates,
    fitted,
)
from rlhf_megatron.simulator.cluster import Cluster
from rlhf_megatron.simulator.setup import Workload, make_setup
from rlhf_megatron.simulator.steps import Simulation, simulate
from rlhf_megatron.validation import validate

MOST_SHOWN = 3
"""Placements of each kind."""
MOST_REFUSALS = 20
"""By the planner, of each kind, before it is given up."""
LOWER_UTILIZATIONS = 3


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A placement that fits."""

    candidate: Candidate
    simulation: Simulation
    plan: MemoryPlan | None
    """None on CPUs."""


@dataclass(kw_only=True)
class Search:
    """What a search found."""

    ranked: list[Placed] = field(default_factory=list)
    """The best first; of each kind the best few."""
    num_tried: int = 0
    no_room: int = 0
    """Dropped by the bounds."""
    refused: dict[str, str] = field(default_factory=dict)
    """Kind -> what the planner said of faster ones that do not fit, the most frequent."""
    num_refused: dict[str, int] = field(default_factory=dict)


def search(
    config: Config,
    *,
    models: RoleModels,
    cluster: Cluster,
    world_size: int,
    workload: Workload,
) -> Search:
    """Raises UserError where nothing fits."""
    found, by_kind = Search(), dict[str, list[tuple[float, Candidate]]]()
    for candidate in candidates(config, models=models, cluster=cluster, world_size=world_size):
        found.num_tried += 1
        sized = fitted(
            candidate, config=config, models=models, cluster=cluster, world_size=world_size
        )
        if sized is None:
            found.no_room += 1
            continue
        simulation = _simulated(
            sized, config=config, models=models, cluster=cluster, world_size=world_size,
            workload=workload,
        )  # fmt: skip
        by_kind.setdefault(sized.kind, []).append((simulation.samples_per_second, sized))
    for kind, of_kind in by_kind.items():
        of_kind.sort(key=lambda entry: -entry[0])
        reasons: Counter[str] = Counter()
        placed: list[Placed] = []
        refused: list[tuple[Candidate, str]] = []
        for _, candidate in of_kind:
            if len(placed) == MOST_SHOWN or sum(reasons.values()) == MOST_REFUSALS:
                break
            if any(_fails_too(candidate, other, reason=why) for other, why in refused):
                continue
            result = _planned(
                candidate, config=config, models=models, cluster=cluster, world_size=world_size,
                workload=workload,
            )  # fmt: skip
            if isinstance(result, Placed):
                placed.append(result)
            else:
                reasons[result] += 1
                refused.append((candidate, result))
        found.ranked += placed
        if reasons:
            found.refused[kind] = reasons.most_common(1)[0][0]
            found.num_refused[kind] = sum(reasons.values())
    if not found.ranked:
        raise UserError(nothing_fits(found, world_size=world_size, cluster=cluster))
    found.ranked.sort(key=lambda placed: -placed.simulation.samples_per_second)
    return found


def _fails_too(candidate: Candidate, refused: Candidate, *, reason: str) -> bool:
    """Whether what does not fit in one placement does not fit in the other: the same layout of the
    role whose phase is too large, beside no less of the other role on the same GPUs."""
    if (candidate.critic_ranks, candidate.ref_with_critic, candidate.offloads) != (
        refused.critic_ranks,
        refused.ref_with_critic,
        refused.offloads,
    ):
        return False
    own, other = ("critic", "actor") if "critic" in reason else ("actor", "critic")
    if getattr(candidate, own) != getattr(refused, own):
        return False
    shards, of_refused = prod(getattr(candidate, other)), prod(getattr(refused, other))
    return candidate.critic_ranks > 0 or shards <= of_refused


def nothing_fits(found: Search, *, world_size: int, cluster: Cluster) -> str:
    """The message of a search without a result."""
    why = "; ".join(f"{kind}: {reason}" for kind, reason in found.refused.items())
    return (
        f"--world-size {world_size}: none of {found.num_tried} placements fits "
        f"{cluster.memory_gb} GB a GPU ({found.no_room} by weights, gradients and optimizer alone"
        f"{'; ' + why if why else ''}); give more GPUs, recompute more "
        "(actor.recompute.granularity=full) or shorten the samples"
    )


def _simulated(
    candidate: Candidate,
    *,
    config: Config,
    models: RoleModels,
    cluster: Cluster,
    world_size: int,
    workload: Workload,
) -> Simulation:
    setup = make_setup(
        apply(candidate, config=config, world_size=world_size),
        models=models,
        cluster=cluster,
        world_size=world_size,
        workload=workload,
        depth=candidate.depth,
    )
    return simulate(setup)


def _planned(
    candidate: Candidate,
    *,
    config: Config,
    models: RoleModels,
    cluster: Cluster,
    world_size: int,
    workload: Workload,
) -> Placed | str:
    """With the largest share of the GPU for the engine with which it fits, or why it does not."""
    reason = ""
    for fewer in range(LOWER_UTILIZATIONS + 1):
        tried = replace(
            candidate, utilization=round(candidate.utilization - fewer * UTILIZATION_STEP, 2)
        )
        if tried.utilization <= 0:
            break
        placed = apply(tried, config=config, world_size=world_size)
        problems = [p for p in validate(placed, world_size=world_size) if _is_of_layouts(p)]
        if problems:
            return problems[0]
        plan = None
        if cluster.memory_gb is not None:
            plan = plan_memory(
                placed, models=models, machine=machine_of(cluster, world_size=world_size)
            )
            if not plan.fits:
                reason = reason or "; ".join(plan.problems)
                continue
        simulation = _simulated(
            tried, config=config, models=models, cluster=cluster, world_size=world_size,
            workload=workload,
        )  # fmt: skip
        return Placed(candidate=tried, simulation=simulation, plan=plan)
    return reason


def _is_of_layouts(problem: str) -> bool:
    """Not of files and keys that a search does not need; split placement is the search's matter."""
    return ".parallel." in problem or "mini_batch" in problem


def machine_of(cluster: Cluster, *, world_size: int) -> Machine:
    """For the memory planner."""
    return Machine(
        world_size=world_size,
        gpu_memory_bytes=None if cluster.memory_gb is None else int(cluster.memory_gb * 1e9),
        gpus_per_node=min(cluster.ranks_per_node, world_size),
        host_memory_bytes=int(cluster.host_memory_gb * 1e9) if cluster.host_memory_gb else None,
    )


def best_of_kinds(found: Search) -> Mapping[str, Placed]:
    """Kind -> its best, the best kind first."""
    best: dict[str, Placed] = {}
    for placed in found.ranked:
        best.setdefault(placed.candidate.kind, placed)
    return best
