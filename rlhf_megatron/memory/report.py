"""The plan in words and as JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf_megatron.memory.plan import MemoryPlan
from rlhf_megatron.memory.rank import PhaseMemory, RankMemory
from rlhf_megatron.memory.suggestions import Advice, Suggestion

GB = 1e9
PASS_KINDS = ("activations", "recomputed", "logits", "workspace", "batch")
MOST_SUGGESTIONS = 8
MOST_STAGES_SHOWN = 4


def describe_plan(plan: MemoryPlan, *, advice: Advice | None = None) -> str:
    """The table of the ranks with the highest peak, and all that follows from it."""
    machine = plan.machine
    limit = machine.gpu_memory_bytes
    devices = f"GPUs of {limit / GB:.0f} GB" if limit is not None else "CPU processes"
    lines = [
        f"memory: {machine.world_size} {devices}, {machine.gpus_per_node} a node "
        "(all in GB of 10^9 bytes)"
    ]
    if plan.lora_rank:
        lines.append(
            f"  planned with adapters of rank {plan.lora_rank} on actor and critic, which the "
            "trainer cannot train yet"
        )
    worst = plan.worst
    lines += [f"  {_whose(worst)}:", *_table(worst), ""]
    lines += [f"  {line}" for line in _verdict(plan)]
    lines += [f"  {line}" for line in _stages(plan)]
    lines += [f"  {line}" for line in _cache(plan)]
    lines += [f"  {line}" for line in _host(plan)]
    if advice is not None:
        lines += [f"  {line}" for line in _advice(advice)]
    return "\n".join(lines)


def _whose(rank: RankMemory) -> str:
    stages = ", ".join(f"{role} stage {stage}" for role, stage in rank.stages.items())
    first = ",".join(map(str, rank.ranks[:8])) + (",..." if len(rank.ranks) > 8 else "")
    return f"the fullest ranks, {first} ({stages})"


def _table(rank: RankMemory) -> Iterator[str]:
    owners = [role.setting.name for role in rank.roles]
    if any(phase.of(owner="reward") for phase in rank.phases):
        owners.append("reward")
    names = [*owners, "engine", "pass", "other", "total"]
    yield "    " + f"{'phase':<14}" + "".join(f"{name:>8}" for name in names)
    for phase in rank.phases:
        passing = sum(phase.of(kind=kind) for kind in PASS_KINDS)
        passing -= phase.of(owner="engine", kind="workspace")
        lasting = [
            sum(phase.of(owner=owner, kind=kind) for kind in ("weights", "gradients", "optimizer"))
            for owner in owners
        ]
        engine = phase.of(owner="engine")
        cells = [*lasting, engine, passing]
        cells += [phase.total - sum(cells), phase.total]
        mark = "  <- peak" if phase is rank.peak else ""
        yield f"    {phase.phase:<14}" + "".join(f"{cell / GB:8.2f}" for cell in cells) + mark


def _verdict(plan: MemoryPlan) -> Iterator[str]:
    peak, limit = plan.peak, plan.machine.gpu_memory_bytes
    at = f"peak: {peak.phase}" + (f", {peak.instant}" if peak.instant else "")
    if limit is None:
        yield f"{at}, {peak.total / GB:.2f} GB a process"
    else:
        share = peak.total / limit
        yield f"{at}, {peak.total / GB:.1f} of {limit / GB:.0f} GB ({share:.0%})"
        if plan.fits:
            yield f"fits, with {(limit - peak.total) / GB:.1f} GB to spare"
    for problem in plan.problems:
        yield f"does not fit: {problem}"
    yield "at the peak: " + ", ".join(
        f"{owner} {kind} {size / GB:.2f}" for owner, kind, size in _largest(peak)
    )


def _largest(phase: PhaseMemory, *, count: int = 8) -> list[tuple[str, str, int]]:
    items = sorted(phase.items, key=lambda item: -item.num_bytes)[:count]
    return [(item.owner, item.kind, item.num_bytes) for item in items]


def _stages(plan: MemoryPlan) -> Iterator[str]:
    """Where ranks differ: the peak of each kind of them."""
    if len(plan.ranks) == 1:
        return
    ordered = sorted(plan.ranks, key=lambda rank: -rank.peak.total)
    shown = [
        f"rank {rank.ranks[0]} ({'/'.join(map(str, rank.stages.values()))}): "
        f"{rank.peak.total / GB:.1f} in {rank.peak.phase}"
        for rank in ordered[:MOST_STAGES_SHOWN]
    ]
    least = ordered[-1].peak.total / GB
    yield f"by stages ({'/'.join(plan.worst.stages)}): {'; '.join(shown)}; least {least:.1f}"


def _cache(plan: MemoryPlan) -> Iterator[str]:
    engine, capacity = plan.engine, plan.engine.capacity
    yield (
        f"KV cache: {engine.kv_cache / GB:.1f} GB a rank, {capacity.token_bytes / 1e3:.1f} kB a "
        f"token: {capacity.tokens} tokens"
    )
    yield (
        f"  at once {capacity.sequences} sequences of {capacity.sequence_tokens} tokens, "
        f"{capacity.half_length_sequences} of half that length (max_num_seqs "
        f"{capacity.max_num_seqs})"
    )


def _host(plan: MemoryPlan) -> Iterator[str]:
    parts = ", ".join(f"{kind} {size / GB:.1f}" for kind, size in plan.worst.host.by_kind.items())
    yield f"host memory: {plan.node_host_bytes / GB:.0f} GB a node; a rank: {parts}"


def _advice(advice: Advice) -> Iterator[str]:
    if not advice.single and not advice.together:
        return
    yield ""
    yield "what would help (gain: by how much the peak falls), each alone:"
    for suggestion in advice.single[:MOST_SUGGESTIONS]:
        yield from _suggestion(suggestion)
    if advice.plan_together is None:
        yield "no combination of these was found that fits: more or larger GPUs, or smaller models"
        return
    if len(advice.together) > 1:
        peak = advice.plan_together.peak
        yield f"together these fit, with a peak of {peak.total / GB:.1f} GB in {peak.phase}:"
        yield "  " + " ".join(text for s in advice.together for text in s.overrides)


def _suggestion(suggestion: Suggestion) -> Iterator[str]:
    fits = "fits" if suggestion.fits else "not enough"
    host = suggestion.host_gain_bytes / GB
    also = f", host {-host:+.0f} GB a node" if abs(host) >= 1 else ""
    yield (
        f"  {suggestion.gain_bytes / GB:6.1f} GB ({fits}{also})  {' '.join(suggestion.overrides)}"
    )
    yield f"{'':14}cost: {suggestion.cost}"


def plan_figures(plan: MemoryPlan, *, advice: Advice | None = None) -> dict[str, Any]:
    """The plan as plain values. Sizes are bytes."""
    machine, capacity = plan.machine, plan.engine.capacity
    return {
        "world_size": machine.world_size,
        "gpu_memory_bytes": machine.gpu_memory_bytes,
        "gpus_per_node": machine.gpus_per_node,
        "lora_rank": plan.lora_rank,
        "fits": plan.fits,
        "problems": list(plan.problems),
        "peak": _phase_figures(plan.peak),
        "peak_rank": plan.worst.ranks[0],
        "ranks": [_rank_figures(rank) for rank in plan.ranks],
        "engine": {
            "weights_bytes": plan.engine.weights,
            "kv_cache_bytes": plan.engine.kv_cache,
            "workspace_bytes": plan.engine.workspace,
            "cuda_graphs_bytes": plan.engine.cuda_graphs,
            "kv_token_bytes": capacity.token_bytes,
            "kv_tokens": capacity.tokens,
            "sequence_tokens": capacity.sequence_tokens,
            "sequences_at_once": capacity.sequences,
            "half_length_sequences_at_once": capacity.half_length_sequences,
        },
        "node_host_bytes": plan.node_host_bytes,
        "suggestions": _suggestion_figures(advice.single) if advice is not None else [],
        "together": _suggestion_figures(advice.together) if advice is not None else [],
    }


def _rank_figures(rank: RankMemory) -> dict[str, Any]:
    return {
        "ranks": list(rank.ranks),
        "stages": dict(rank.stages),
        "phases": [_phase_figures(phase) for phase in rank.phases],
        "host": dict(rank.host.by_kind),
    }


def _phase_figures(phase: PhaseMemory) -> dict[str, Any]:
    return {
        "phase": phase.phase,
        "total_bytes": phase.total,
        "allocated_bytes": phase.allocated,
        "instant": phase.instant,
        "items": [
            {"owner": item.owner, "kind": item.kind, "bytes": item.num_bytes}
            for item in phase.items
        ],
    }


def _suggestion_figures(suggestions: Sequence[Suggestion]) -> list[dict[str, Any]]:
    return [
        {
            "overrides": list(s.overrides),
            "gain_bytes": s.gain_bytes,
            "host_gain_bytes": s.host_gain_bytes,
            "fits": s.fits,
            "cost": s.cost,
        }
        for s in suggestions
    ]
