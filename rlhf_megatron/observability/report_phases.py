"""The phases of a step in a report: their order, their colours, where the time went."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from rlhf_megatron.observability.ledger import STEP
from rlhf_megatron.observability.report_data import RunData
from rlhf_megatron.observability.thinning import thin

OTHERS, OUTSIDE = "other phases", "outside phases"
LEAST_SHARE = 0.01
"""Of the time; phases below are put together."""
MOST_PHASES = 10
CHECKPOINT = "checkpoint"
"""Lies between two steps; its seconds are those of the step that it held up."""

_COLORS = {
    "setup": "#777777",
    "warmup": "#999933",
    "rollout": "#4477aa",
    "exchange": "#bb5566",
    "reward": "#66ccee",
    "sleep": "#bbccee",
    "log_prob": "#117733",
    "ref_log_prob": "#44aa77",
    "value": "#99cc66",
    "advantage": "#ddcc77",
    "update_critic": "#ee8866",
    "update_actor": "#cc3355",
    "reshard": "#aa4499",
    "evaluation_rollout": "#777799",
    "evaluation_reward": "#aaaacc",
    CHECKPOINT: "#885533",
    OTHERS: "#bbbbbb",
    OUTSIDE: "#dddddd",
}
"""In the order of a step."""
_FURTHER = ("#5f9ea0", "#8a7f5c", "#c49bbb", "#6b8fd6", "#8fae8b", "#d0a060")


def phase_color(phase: str) -> str:
    """The same in every chart and every report."""
    return _COLORS.get(phase) or _FURTHER[sum(phase.encode()) % len(_FURTHER)]


def phase_order(phases: Iterable[str]) -> list[str]:
    """As they come in a step; phases that are not known before the last ones."""
    known = list(_COLORS)
    unknown_at = known.index("evaluation_rollout") - 0.5
    return sorted(set(phases), key=lambda p: (known.index(p) if p in known else unknown_at, p))


@dataclass(kw_only=True)
class TimeByPhase:
    """Where a run's time went. Seconds are those of the slowest rank of each phase."""

    total_seconds: float = 0.0
    """Of all steps, checkpoints included."""
    mean_seconds: dict[str, float] = field(default_factory=dict)
    """By phase, small ones too: mean per step."""
    steps: list[int] = field(default_factory=list)
    """Of the bars: the last step of each."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """By phase, small ones put together: of each bar, mean per step."""
    bucket_steps: int = 1

    @property
    def tallest_seconds(self) -> float:
        return max((sum(bar) for bar in zip(*self.seconds.values(), strict=True)), default=0.0)

    @property
    def shares(self) -> dict[str, float]:
        """By phase, small ones put together: part of the whole, the largest first."""
        sums = {phase: math.fsum(bars) for phase, bars in self.seconds.items()}
        whole = math.fsum(sums.values())
        if whole <= 0:
            return {}
        return {
            phase: seconds / whole
            for phase, seconds in sorted(sums.items(), key=lambda item: -item[1])
        }


def time_by_phase(run: RunData, *, most_bars: int) -> TimeByPhase:
    """From time/<phase>_seconds; empty where no step has any."""
    columns: dict[str, list[float]] = {}
    for key in run.keys("time/"):
        if key.endswith("_seconds"):
            phase = key.removeprefix("time/").removesuffix("_seconds")
            columns[phase] = [value or 0.0 for value in run.series(key)]
    whole = columns.pop(STEP, None)
    if not columns and whole is None:
        return TimeByPhase()
    num_steps = len(run.steps)
    if whole is not None:
        inside = [c for phase, c in columns.items() if phase != CHECKPOINT]
        columns[OUTSIDE] = [max(w - sum(c[i] for c in inside), 0.0) for i, w in enumerate(whole)]
    columns = {phase: columns[phase] for phase in phase_order(columns) if any(columns[phase])}
    totals = {phase: math.fsum(column) for phase, column in columns.items()}
    steps = [int(row["step"]) for row in run.steps]
    result = TimeByPhase(mean_seconds={p: total / num_steps for p, total in totals.items()})
    result.total_seconds = math.fsum(whole or []) + totals.get(CHECKPOINT, 0.0)
    if whole is None:
        result.total_seconds = math.fsum(totals.values())
    for phase, column in _with_others(columns, totals=totals).items():
        bars = thin(steps, column, most=most_bars)
        result.steps, result.bucket_steps = bars.steps, bars.bucket_steps
        result.seconds[phase] = [value or 0.0 for value in bars.values]
    return result


def _with_others(
    columns: dict[str, list[float]], *, totals: dict[str, float]
) -> dict[str, list[float]]:
    """Phases of hardly any time become one, where there are many."""
    whole = math.fsum(totals.values())
    small = [p for p in columns if totals[p] < LEAST_SHARE * whole and p != OUTSIDE]
    if len(columns) <= MOST_PHASES or len(small) < 2:
        return columns
    kept = {phase: column for phase, column in columns.items() if phase not in small}
    kept[OTHERS] = [math.fsum(values) for values in zip(*(columns[p] for p in small), strict=True)]
    return {phase: kept[phase] for phase in phase_order(kept)}


@dataclass(frozen=True, kw_only=True)
class IdleByRank:
    """Idle shares put together to a grid that a page can show."""

    steps: list[int]
    """Of the columns: the last step of each."""
    ranks: list[str]
    """Of the rows: "3", or "0-7" where several are put together."""
    shares: list[list[float | None]]
    """[ranks][steps], means; None where nothing is recorded."""
    bucket_steps: int


def idle_by_rank(run: RunData, *, most_steps: int, most_ranks: int) -> IdleByRank:
    """From the ledger; empty where it has no whole step."""
    steps = sorted(run.idle_shares)
    ranks = sorted({rank for shares in run.idle_shares.values() for rank in shares})
    size = max(math.ceil(len(ranks) / most_ranks), 1)
    found = IdleByRank(steps=[], ranks=[], shares=[], bucket_steps=1)
    for start in range(0, len(ranks), size):
        members = ranks[start : start + size]
        values: list[float | None] = []
        for step in steps:
            known = [share for r in members if (share := run.idle_shares[step].get(r)) is not None]
            values.append(math.fsum(known) / len(known) if known else None)
        line = thin(steps, values, most=most_steps)
        found = IdleByRank(
            steps=line.steps,
            ranks=[*found.ranks, "-".join(dict.fromkeys((str(members[0]), str(members[-1]))))],
            shares=[*found.shares, line.values],
            bucket_steps=line.bucket_steps,
        )
    return found


def peak_text(run: RunData, *, phase: str) -> str:
    """Where a phase's measured peak was: "step 12, rank 3"; "" where it is not known."""
    peak = run.peaks.get(phase)
    if peak is None:
        return ""
    rank = "" if peak.rank is None else f", rank {peak.rank}"
    least = peak.least_rank_gb
    spread = "" if least is None else f", least of a rank {least:.4g} GB"
    return f"step {peak.step}{rank}{spread}"
