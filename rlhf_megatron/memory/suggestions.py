"""What would make a plan fit: each change planned anew, with its gain and its cost, best first."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from rlhf_megatron.config import Config
from rlhf_megatron.loader import show, value_of
from rlhf_megatron.memory.candidates import Candidate, candidates
from rlhf_megatron.memory.plan import Machine, MemoryPlan, RoleModels, plan_memory
from rlhf_megatron.validation import validate
from rlhf_megatron.validation_model import validate_model

MOST_STEPS = 8
LEAST_GAIN_BYTES = 50_000_000
"""Smaller gains are not worth a line."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """One change, as overrides of the command line."""

    overrides: tuple[str, ...]
    gain_bytes: int
    """By which the highest peak of a GPU falls."""
    host_gain_bytes: int
    """By which a node's host memory falls; negative where it grows."""
    fits: bool
    """Whether the plan fits with this change alone."""
    cost: str
    effort: int
    """1 cheap, 2 slower, 3 another layout."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """All that would help, and a way to make it fit."""

    single: tuple[Suggestion, ...]
    """Best first."""
    together: tuple[Suggestion, ...]
    """Changes that fit when made one after the other; empty where none are needed or none do."""
    plan_together: MemoryPlan | None


def suggest(config: Config, *, models: RoleModels, machine: Machine, plan: MemoryPlan) -> Advice:
    """Nothing for a plan that fits."""
    if plan.fits or machine.gpu_memory_bytes is None:
        return Advice(single=(), together=(), plan_together=None)
    found = [s for s, _, _ in _tried(config, models=models, machine=machine, plan=plan)]
    found = [
        s
        for s in found
        if s.fits or max(s.gain_bytes, _host_need(plan) and s.host_gain_bytes) > LEAST_GAIN_BYTES
    ]
    found.sort(key=lambda s: (not s.fits, s.effort if s.fits else 0, -s.gain_bytes))
    together, last = _combined(config, models=models, machine=machine, plan=plan)
    return Advice(single=tuple(found), together=together, plan_together=last)


def helpful_in(
    config: Config, *, phase: str, models: RoleModels, machine: Machine
) -> list[Suggestion]:
    """Changes that lower the planned peak of one phase, the greatest gain first, which is theirs in
    that phase. Of an unknown phase, in the one with the highest peak."""
    plan = plan_memory(config, models=models, machine=machine)
    before = _total(plan, phase=phase)
    found = [
        replace(suggestion, gain_bytes=before - _total(new, phase=phase))
        for suggestion, _, new in _tried(config, models=models, machine=machine, plan=plan)
    ]
    found = [suggestion for suggestion in found if suggestion.gain_bytes > LEAST_GAIN_BYTES]
    return sorted(found, key=lambda s: -s.gain_bytes)


def _total(plan: MemoryPlan, *, phase: str) -> int:
    """The highest peak of a phase over all ranks."""
    totals = [p.total for rank in plan.ranks for p in rank.phases if p.phase == phase]
    return max(totals, default=plan.peak.total)


def changed(config: Config, *, values: Mapping[str, Any]) -> Config:
    """A copy of the configuration with other values at some keys."""
    copy = deepcopy(config)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        setattr(value_of(copy, key=section), name, value)
    return copy


def shortage(plan: MemoryPlan) -> int:
    """Bytes that are missing, summed over the phases and the host: 0 where it fits."""
    limit, host = plan.machine.gpu_memory_bytes, plan.machine.host_memory_bytes
    assert limit is not None
    missing = sum(max(0, phase.total - limit) for phase in plan.worst.phases)
    capacity = plan.engine.capacity
    missing += max(0, capacity.sequence_tokens - capacity.tokens) * capacity.token_bytes
    return missing + (max(0, plan.node_host_bytes - host) if host is not None else 0)


def _host_need(plan: MemoryPlan) -> bool:
    host = plan.machine.host_memory_bytes
    return host is not None and plan.node_host_bytes > host


Trial = tuple[Suggestion, Config, MemoryPlan]


def _tried(
    config: Config, *, models: RoleModels, machine: Machine, plan: MemoryPlan
) -> Iterator[Trial]:
    for candidate in candidates(config, plan=plan):
        other = changed(config, values=candidate.values)
        if _is_refused(other, models=models, world_size=machine.world_size):
            continue
        new = plan_memory(other, models=models, machine=machine, lora_rank=plan.lora_rank)
        yield _suggestion(candidate, old=plan, new=new), other, new


def _is_refused(config: Config, *, models: RoleModels, world_size: int) -> bool:
    return bool(
        validate(config, world_size=world_size)
        or validate_model(config, actor=models.actor, critic=models.critic, ref=models.ref)
    )


def _suggestion(candidate: Candidate, *, old: MemoryPlan, new: MemoryPlan) -> Suggestion:
    return Suggestion(
        overrides=tuple(f"{key}={show(value)}" for key, value in candidate.values.items()),
        gain_bytes=old.peak.total - new.peak.total,
        host_gain_bytes=old.node_host_bytes - new.node_host_bytes,
        fits=new.fits,
        cost=candidate.cost,
        effort=candidate.effort,
    )


def _combined(
    config: Config, *, models: RoleModels, machine: Machine, plan: MemoryPlan
) -> tuple[tuple[Suggestion, ...], MemoryPlan | None]:
    """Greedily: of each round, what takes most of the shortage away for its effort."""
    chosen: list[Suggestion] = []
    while not plan.fits and len(chosen) < MOST_STEPS:
        before = shortage(plan)
        trials: Sequence[Trial] = list(_tried(config, models=models, machine=machine, plan=plan))
        if not trials:
            return (), None
        best = max(trials, key=lambda t: (before - shortage(t[2])) / t[0].effort)
        if shortage(best[2]) >= before:
            return (), None
        suggestion, config, plan = best
        chosen.append(replace(suggestion))
    return (tuple(chosen), plan) if plan.fits else ((), None)
