"""The top of a report: how a run stands, in a few facts, and what needs a look."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlhf_megatron.observability.report_data import Row, RunData, finite
from rlhf_megatron.observability.report_events import PROBLEM
from rlhf_megatron.observability.report_phases import peak_text, time_by_phase
from rlhf_megatron.observability.text import format_number

MUCH_TRUNCATED = 0.5
MOST_STEPS_NAMED = 5
MOST_PHASES_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One row of the summary."""

    name: str
    value: str


def facts(run: RunData) -> list[Fact]:
    """The same names for every run, "" where there is no figure."""
    return [
        Fact(name="Steps", value=_steps(run)),
        Fact(name="Reward", value=_reward(run)),
        Fact(name="Held-out reward", value=_held_out(run)),
        Fact(name="KL to the reference", value=_last(run, "kl/mean", unit="nats")),
        Fact(name="Response length", value=_lengths(run)),
        Fact(name="Throughput", value=_throughput(run)),
        Fact(name="Peak memory", value=_memory(run)),
        Fact(name="Time", value=_time(run)),
    ]


def warnings(run: RunData) -> list[str]:
    """What a person should look at, each in a sentence; empty where nothing is unusual."""
    return [
        *_nonfinite(run),
        *_sums(run),
        *_above_plan(run),
        *_truncated(run),
        *_log_problems(run),
    ]


def duration(seconds: float) -> str:
    """12.3 s, 4 min 5 s, 3 h 20 min, 2 d 3 h."""
    if seconds < 60:
        return f"{format_number(round(seconds, 2))} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def time_shares(run: RunData) -> dict[str, float]:
    """Part of the time by phase, the largest first."""
    return time_by_phase(run, most_bars=1).shares


def _steps(run: RunData) -> str:
    total = run.total_steps
    text = f"{run.last_step} of {total}" if total is not None else str(run.last_step)
    if total is not None and run.last_step >= total:
        return f"{text}, done"
    if run.written_seconds_ago is None:
        return text
    return f"{text}; the last one written {duration(run.written_seconds_ago)} before this report"


def _reward(run: RunData) -> str:
    found = _points(run.steps, "reward/mean")
    if not found:
        return ""
    best = max(found, key=lambda point: point[1])
    text = f"{format_number(found[-1][1])} in the last step"
    if len(found) > 1:
        text += f"; first {format_number(found[0][1])}, best {format_number(best[1])}"
        text += f" in step {best[0]}"
    return text


def _held_out(run: RunData) -> str:
    found = _points(run.evaluations, "evaluation/reward_mean")
    if not found:
        return ""
    best = max(found, key=lambda point: point[1])
    text = f"best {format_number(best[1])} after step {best[0]}"
    if found[-1][0] != best[0]:
        text += f"; last {format_number(found[-1][1])} after step {found[-1][0]}"
    if found[0][0] == 0 and best[0] != 0:
        text += f"; before training {format_number(found[0][1])}"
    return text


def _lengths(run: RunData) -> str:
    text = _last(run, "response/length_mean", unit="tokens")
    truncated = _points(run.steps, "response/truncated_fraction")
    if truncated:
        text += f"{', ' * bool(text)}{truncated[-1][1]:.1%} truncated"
    return text


def _throughput(run: RunData) -> str:
    found = [value for _, value in _points(run.steps, "train/throughput_tokens_per_sec")]
    if not found:
        return ""
    text = f"{format_number(sum(found) / len(found))} tokens/s on average"
    mfu = [value for _, value in _points(run.steps, "train/mfu")]
    return text + (f", MFU {sum(mfu) / len(mfu):.1%}" if mfu else "")


def _memory(run: RunData) -> str:
    if not run.peaks:
        return ""
    phase = max(run.peaks, key=lambda name: run.peaks[name].gb)
    text = f"{format_number(run.peaks[phase].gb)} GB in {phase} ({peak_text(run, phase=phase)})"
    if run.planned_gb:
        planned = max(run.planned_gb, key=lambda name: run.planned_gb[name])
        text += f"; planned {format_number(run.planned_gb[planned])} GB, in {planned}"
    return text


def _time(run: RunData) -> str:
    found = time_by_phase(run, most_bars=1)
    if not found.total_seconds:
        return ""
    mean = found.total_seconds / len(run.steps)
    return f"{duration(found.total_seconds)} in steps, {duration(mean)} a step"


def _last(run: RunData, key: str, *, unit: str) -> str:
    found = _points(run.steps, key)
    return f"{format_number(found[-1][1])} {unit}" if found else ""


def _points(rows: list[Row], key: str) -> list[tuple[int, float]]:
    """(step, value) of the lines with a finite value."""
    found = ((row["step"], finite(row.get(key))) for row in rows)
    return [(step, value) for step, value in found if value is not None]


def _nonfinite(run: RunData) -> Iterator[str]:
    steps_of: dict[str, list[int]] = {}
    for row in run.steps:
        named = row.get("nonfinite")
        keys = set(map(str, named)) if isinstance(named, list) else set()
        keys |= {k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)}
        for key in sorted(keys):
            steps_of.setdefault(key, []).append(row["step"])
    for key, steps in steps_of.items():
        yield f"{key} is not finite in {_steps_named(steps)}"


def _steps_named(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:MOST_STEPS_NAMED]))
    more = len(steps) - MOST_STEPS_NAMED
    return f"step{'s' * (len(steps) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")


def _sums(run: RunData) -> Iterator[str]:
    for key, what in (
        ("faults/skipped_updates", "skipped updates"),
        ("reward/dropped", "responses dropped, since they had no score"),
        ("faults/reward_failures", "failures of the reward"),
        ("memory/alloc_retries", "retries of the allocator, since memory was full"),
    ):
        found = [(step, value) for step, value in _points(run.steps, key) if value > 0]
        if found:
            number = format_number(sum(value for _, value in found))
            yield f"{number} {what}, in {_steps_named([step for step, _ in found])}"


def _above_plan(run: RunData) -> Iterator[str]:
    for phase, planned in run.planned_gb.items():
        peak = run.peaks.get(phase)
        if peak is not None and peak.gb > planned:
            yield (
                f"memory in {phase} was {format_number(peak.gb)} GB, {peak.gb / planned - 1:.1%} "
                f"above the planned {format_number(planned)} GB"
                if planned > 0
                else f"memory in {phase} was {format_number(peak.gb)} GB, and none was planned"
            )


def _truncated(run: RunData) -> Iterator[str]:
    found = _points(run.steps, "response/truncated_fraction")
    if found and found[-1][1] >= MUCH_TRUNCATED:
        yield f"{found[-1][1]:.0%} of the last step's responses were truncated"


def _log_problems(run: RunData) -> Iterator[str]:
    number = sum(event.kind == PROBLEM for event in run.events)
    if number:
        yield f"{number} warning{'s' * (number > 1)} or errors in rank 0's log (see Events)"
