"""A simulation, and a search, in words and as JSON."""

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_megatron.config import Config
from rlhf_megatron.simulator.calibrate import Calibration
from rlhf_megatron.simulator.candidates import overrides
from rlhf_megatron.simulator.search import Placed, Search, best_of_kinds
from rlhf_megatron.simulator.steps import Simulation

LEAST_PART_SHARE = 0.02
LEAST_DIFFERENCE_SECONDS = 0.05
MOST_DIFFERENCES = 3


def describe(simulation: Simulation) -> str:
    """The roles, the step, and a line per phase."""
    setup = simulation.setup
    lengths, device = setup.workload, "GPUs" if setup.cluster.memory_gb is not None else "processes"
    lines = [
        f"{setup.world_size} {device} of {setup.cluster.name}; rates: {setup.cluster.source}",
        f"{setup.num_samples} samples a step of {lengths.prompt_tokens:.0f} prompt and "
        f"{lengths.response_tokens:.0f} response tokens, the longest "
        f"{lengths.longest_response_tokens:.0f}",
        *_roles(simulation),
        "",
        f"step {simulation.step_seconds:.2f} s, {simulation.samples_per_second:.2f} samples/s, "
        f"{simulation.tokens_per_second:,.0f} tokens/s, idle {simulation.idle_share:.1%} of all "
        f"ranks' time ({max(simulation.idle_shares.values()):.1%} of the rank that idles most)",
        *_phases(simulation),
    ]
    return "\n".join(lines)


def figures(simulation: Simulation) -> dict[str, Any]:
    """For --json. Seconds."""
    return {
        "world_size": simulation.setup.world_size,
        "step_seconds": simulation.step_seconds,
        "samples_per_second": simulation.samples_per_second,
        "tokens_per_second": simulation.tokens_per_second,
        "idle_share": simulation.idle_share,
        "idle_share_max": max(simulation.idle_shares.values()),
        "phases": [
            {
                "phase": phase.name,
                "ranks": len(phase.ranks),
                "passages": phase.passages,
                "begin_seconds": phase.begin_seconds,
                "end_seconds": phase.end_seconds,
                "parts_seconds": dict(phase.cost.parts),
            }
            for phase in simulation.phases
        ],
    }


def _roles(simulation: Simulation) -> Iterator[str]:
    setup = simulation.setup
    for name, role in setup.roles.items():
        layout = role.layout
        yield (
            f"  {name:<8} {_ranks(layout.ranks):<12} TP{layout.tensor_model_parallel_size} "
            f"PP{layout.pipeline_model_parallel_size} DP{layout.data_parallel_size}, "
            f"idle {simulation.idle_of(name):.1%}"
        )
    yield (
        f"  {'rollout':<8} {_ranks(setup.rollout_ranks):<12} {setup.num_engines} engines of "
        f"TP{setup.engine_size}, {setup.sequences_at_once} sequences at once; pipeline.depth "
        f"{setup.depth}"
    )


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"


def _phases(simulation: Simulation) -> Iterator[str]:
    yield f"  {'phase':<14}{'ranks':>6}{'from':>9}{'to':>9}  seconds by what they go to"
    for phase in simulation.phases:
        whole = phase.cost.seconds
        parts = ", ".join(
            f"{name.replace('_', ' ')} {seconds:.2f}"
            for name, seconds in sorted(phase.cost.parts.items(), key=lambda part: -part[1])
            if seconds >= LEAST_PART_SHARE * whole
        )
        times = f"{phase.passages} x " if phase.passages > 1 else ""
        yield (
            f"  {phase.name:<14}{len(phase.ranks):>6}{phase.begin_seconds:>9.2f}"
            f"{phase.end_seconds:>9.2f}  {times}{parts}"
        )


def describe_search(found: Search, *, config: Config, world_size: int) -> str:
    """The best placement with its table, and the best of each other kind with what it loses by."""
    best = found.ranked[0]
    lines = [
        f"{found.num_tried} placements, {found.no_room} without room for weights, gradients and "
        f"optimizer, {sum(found.num_refused.values())} of the fastest refused by the planner",
        "",
        f"best: {best.candidate.kind}",
        *(f"  {word}" for word in overrides(best.candidate, config=config, world_size=world_size)),
        f"  {_memory(best)}",
        "",
        describe(best.simulation),
        "",
        "the best of each kind:",
    ]
    for kind, placed in best_of_kinds(found).items():
        lines += [*_against(placed, best=best, kind=kind)]
        if kind in found.refused:
            lines.append(
                f"    memory: {found.num_refused[kind]} faster ones do not fit, such as: "
                f"{found.refused[kind]}"
            )
    missing = {kind: why for kind, why in found.refused.items() if kind not in best_of_kinds(found)}
    lines += [f"  {kind}: none of the fastest fits: {why}" for kind, why in missing.items()]
    return "\n".join(lines)


def search_figures(found: Search, *, config: Config, world_size: int) -> dict[str, Any]:
    """For --json."""
    return {
        "tried": found.num_tried,
        "without_room": found.no_room,
        "refused": dict(found.refused),
        "ranked": [
            {
                "kind": placed.candidate.kind,
                "overrides": overrides(placed.candidate, config=config, world_size=world_size),
                "peak_gb": placed.plan.peak.total / 1e9 if placed.plan else None,
                **figures(placed.simulation),
            }
            for placed in found.ranked
        ],
    }


def _memory(placed: Placed) -> str:
    plan = placed.plan
    if plan is None:
        return "memory is not planned on CPUs"
    limit = plan.machine.gpu_memory_bytes or 0
    return (
        f"memory: {plan.peak.total / 1e9:.1f} of {limit / 1e9:.0f} GB, in {plan.peak.phase}; a "
        f"node's host {plan.node_host_bytes / 1e9:.0f} GB"
    )


def _against(placed: Placed, *, best: Placed, kind: str) -> Iterator[str]:
    simulation = placed.simulation
    ratio = simulation.samples_per_second / best.simulation.samples_per_second
    actor, critic = (simulation.setup.roles[name].layout for name in ("actor", "critic"))
    yield (
        f"  {kind}: {simulation.samples_per_second:.2f} samples/s ({ratio:.0%}), actor "
        f"TP{actor.tensor_model_parallel_size} PP{actor.pipeline_model_parallel_size} "
        f"DP{actor.data_parallel_size} on {len(actor.ranks)}, critic "
        f"TP{critic.tensor_model_parallel_size} PP{critic.pipeline_model_parallel_size} "
        f"DP{critic.data_parallel_size} on {len(critic.ranks)}, engines of "
        f"TP{simulation.setup.engine_size}"
    )
    bubble = sum(phase.cost.parts.get("bubble", 0.0) for phase in simulation.phases)
    yield (
        f"    idle {simulation.idle_share:.1%} (actor {simulation.idle_of('actor'):.1%}, critic "
        f"{simulation.idle_of('critic'):.1%}), pipeline bubbles {bubble:.1f} s of "
        f"{simulation.step_seconds:.1f} s"
    )
    if placed is not best:
        yield from _differences(_spans(simulation), best=_spans(best.simulation))


def _spans(simulation: Simulation) -> dict[str, float]:
    return {phase.name: phase.passages * phase.cost.seconds for phase in simulation.phases}


def _differences(spans: Mapping[str, float], *, best: Mapping[str, float]) -> Iterator[str]:
    """The phases that are longer than in the best placement, those that grow most first."""
    longer = sorted(((spans[phase] - best.get(phase, 0.0), phase) for phase in spans), reverse=True)
    shown = [
        f"{phase} {spans[phase]:.1f} s against {best.get(phase, 0.0):.1f}"
        for more, phase in longer[:MOST_DIFFERENCES]
        if more > LEAST_DIFFERENCE_SECONDS
    ]
    if shown:
        yield f"    longer: {', '.join(shown)}"


def describe_calibration(found: Calibration) -> str:
    """How well the rates fit, phase by phase."""
    simulated, measured = found.step_seconds
    unit = "CPU s" if found.cluster.cores_per_node is not None else "s"
    lines = [
        f"calibrated: {found.cluster.source}; step {simulated:.3f} s simulated, {measured:.3f} s "
        "measured",
        f"  {'phase':<14}{f'fit, {unit}':>12}{'measured':>12}{'factor':>8}",
    ]
    for phase, (fit, seen) in found.phases.items():
        factor = found.cluster.phase_factors.get(phase, 1.0)
        lines.append(f"  {phase:<14}{fit:>12.4f}{seen:>12.4f}{factor:>8.2f}")
    if found.cluster.cores_per_node is not None:
        lines.append(f"  cores that the run had: {found.cluster.cores_per_node:.2f}")
    return "\n".join(lines)
