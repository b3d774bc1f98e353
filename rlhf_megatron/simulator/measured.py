"""What a run took, from its folder: medians over its steps, and the lengths of its samples."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rlhf_megatron.errors import UserError
from rlhf_megatron.observability.ledger import LEDGER_FILE, STEP, PhaseRecord
from rlhf_megatron.observability.ledger_read import read_steps
from rlhf_megatron.simulator.setup import Workload

WARM_UP_STEPS = 2
"""Left out: compilation, caches, first allocations."""
LEAST_STEPS = 3
OUTSIDE = "outside"


@dataclass(frozen=True, kw_only=True)
class MeasuredPhase:
    """A phase of a step, several passages added up; medians over steps."""

    seconds: float
    """Of the slowest rank."""
    cpu_seconds: float
    """Mean over the ranks that enter it; 0 in the ledgers of older runs."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run as the simulator looks at it."""

    folder: Path
    world_size: int
    num_steps: int
    """Those that count."""
    step_seconds: float
    """Median over steps, of the slowest rank, without evaluations and checkpoints."""
    fastest_step_seconds: float
    step_cpu_seconds: float
    """Median over steps, of all ranks together."""
    phases: dict[str, MeasuredPhase]
    """With `outside`: what lies between them."""
    workload: Workload


def read_run(folder: Path) -> MeasuredRun:
    """Raises UserError where the run has too few steps, or its files are missing."""
    path = folder / LEDGER_FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the run.output_dir of a run")
    by_step = [
        records
        for ledger in read_steps(path)
        if (records := _of_step(ledger.phases)) and records[0].step > WARM_UP_STEPS
    ]
    if len(by_step) < LEAST_STEPS:
        raise UserError(
            f"{folder}: {len(by_step)} steps after the {WARM_UP_STEPS} of warm-up; a calibration "
            f"needs at least {LEAST_STEPS}, of run.steps={WARM_UP_STEPS + LEAST_STEPS} or more"
        )
    walls = [_step_seconds(records) for records in by_step]
    totals = [sum(r.cpu_seconds for r in records if r.phase == STEP) for records in by_step]
    names = {name: None for records in by_step for name in _phase_totals(records)}
    tables = [_phase_totals(records) for records in by_step]
    none = MeasuredPhase(seconds=0.0, cpu_seconds=0.0)
    return MeasuredRun(
        folder=folder,
        world_size=1 + max(record.rank for record in by_step[0]),
        num_steps=len(by_step),
        step_seconds=median(walls),
        fastest_step_seconds=min(walls),
        step_cpu_seconds=median(totals),
        phases={
            name: MeasuredPhase(
                seconds=median(table.get(name, none).seconds for table in tables),
                cpu_seconds=median(table.get(name, none).cpu_seconds for table in tables),
            )
            for name in names
        },
        workload=_workload(folder),
    )


def _of_step(phases: Sequence[PhaseRecord]) -> list[PhaseRecord]:
    """Without what lies between steps; nothing where the step is not whole."""
    ends = [r.end_unix_seconds for r in phases if r.phase == STEP]
    if not ends:
        return []
    return [r for r in phases if r.start_unix_seconds <= max(ends)]


def _is_beside(record: PhaseRecord) -> bool:
    """Not part of a PPO step."""
    return record.phase.startswith("evaluation_") or record.phase in ("checkpoint", "warmup")


def _step_seconds(records: Sequence[PhaseRecord]) -> float:
    found: dict[int, float] = {}
    for record in records:
        sign = 1 if record.phase == STEP else -1 if _is_beside(record) else 0
        found[record.rank] = found.get(record.rank, 0.0) + sign * record.seconds
    return max(found.values())


def _phase_totals(records: Sequence[PhaseRecord]) -> dict[str, MeasuredPhase]:
    by_rank: dict[str, dict[int, tuple[float, float]]] = {}
    for record in records:
        for name, sign in _counts_in(record):
            ranks = by_rank.setdefault(name, {})
            seconds, cpu = ranks.get(record.rank, (0.0, 0.0))
            ranks[record.rank] = (seconds + sign * record.seconds, cpu + sign * record.cpu_seconds)
    return {
        name: MeasuredPhase(
            seconds=max(seconds for seconds, _ in ranks.values()),
            cpu_seconds=fmean(cpu for _, cpu in ranks.values()),
        )
        for name, ranks in by_rank.items()
    }


def _counts_in(record: PhaseRecord) -> list[tuple[str, int]]:
    """A step is its phases and what lies outside of them."""
    if record.phase == STEP:
        return [(OUTSIDE, 1)]
    if _is_beside(record):
        return [(OUTSIDE, -1)]
    return [(record.phase, 1), (OUTSIDE, -1)]


def _workload(folder: Path) -> Workload:
    """Means over the samples in rollouts/, of the steps after the warm-up."""
    prompts: list[float] = []
    responses: list[float] = []
    longest: list[float] = []
    for path in sorted((folder / "rollouts").glob("step_*.jsonl"))[WARM_UP_STEPS:]:
        rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
        prompts += [row["prompt_tokens"] for row in rows]
        responses += [row["response_tokens"] for row in rows]
        longest.append(max(row["response_tokens"] for row in rows))
    if not longest:
        raise UserError(
            f"{folder / 'rollouts'}: holds no samples of steps after {WARM_UP_STEPS}; a "
            "calibration needs their lengths (logging.rollouts_interval_steps=1)"
        )
    return Workload(
        prompt_tokens=fmean(prompts),
        response_tokens=fmean(responses),
        longest_response_tokens=fmean(longest),
    )
