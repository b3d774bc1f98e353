"""What a report shows of a run, read from the run's folder, whatever state that is in.

A run may still be going, have written nothing yet, or have been killed in the middle of a line:
what is missing or damaged becomes a note, never an error.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlhf_megatron.errors import UserError
from rlhf_megatron.observability.idle import idle_shares
from rlhf_megatron.observability.ledger import STEP, CommunicationRecord, PhaseRecord
from rlhf_megatron.observability.ledger_read import by_step, record_of
from rlhf_megatron.observability.memory import GB
from rlhf_megatron.observability.redact import redact_text, redact_tree
from rlhf_megatron.observability.report_events import Event, read_events
from rlhf_megatron.observability.report_samples import StepSamples, read_samples

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
LEDGER = "ledger.jsonl"
PLAN = "memory_plan.json"
CONFIG = "config.yaml"

LARGEST_LEDGER_BYTES = 50_000_000
"""Of a longer ledger only the end is read; metrics.jsonl has the worst rank of every step."""

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The largest memory of a phase over the run, and where that was."""

    gb: float
    step: int
    rank: int | None
    """None where only metrics.jsonl is there, which keeps the worst rank's figure."""
    least_rank_gb: float | None = None
    """The peak of the rank that needed least."""


@dataclass(kw_only=True)
class RunData:
    """One run."""

    folder: Path
    label: str
    """Short and unique in the report."""
    steps: list[Row] = field(default_factory=list)
    """The lines of metrics.jsonl in order of their step, the last one of each."""
    evaluations: list[Row] = field(default_factory=list)
    peaks: dict[str, Peak] = field(default_factory=dict)
    """By phase, those outside steps (warmup, first evaluation) included."""
    idle_shares: dict[int, dict[int, float]] = field(default_factory=dict)
    """Step -> rank -> share of the step in which the rank does none of its work (idle.py)."""
    planned_gb: dict[str, float] = field(default_factory=dict)
    """Planned peak by phase; empty without memory_plan.json."""
    config: dict[str, Any] = field(default_factory=dict)
    """As resolved; secrets are redacted."""
    events: list[Event] = field(default_factory=list)
    samples: StepSamples = field(default_factory=StepSamples)
    written_seconds_ago: float | None = None
    """Age of metrics.jsonl; None where there is none."""
    notes: list[str] = field(default_factory=list)
    """What is missing, damaged or left out."""

    @property
    def last_step(self) -> int:
        """0 before the first."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def total_steps(self) -> int | None:
        """run.steps; None where the configuration is missing."""
        found = self.setting("run.steps")
        return found if isinstance(found, int) else None

    @property
    def name(self) -> str:
        """run.name, or the folder's name."""
        return str(self.setting("run.name") or self.folder.name)

    def setting(self, key: str) -> Any:
        """The value of `key.path`; None where there is none."""
        found: Any = self.config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def series(self, key: str, *, of: Sequence[Row] | None = None) -> list[float | None]:
        """A metric's values by line, None where it is missing or not finite."""
        return [finite(row.get(key)) for row in (self.steps if of is None else of)]

    def keys(self, prefix: str) -> list[str]:
        """Metric keys that start so, in the order of their first appearance."""
        found = {key: None for row in self.steps for key in row if key.startswith(prefix)}
        return list(found)


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Raises UserError for a folder that holds no run."""
    problems = [problem for folder in folders if (problem := _no_run(folder))]
    if problems:
        raise UserError("; ".join(problems))
    return [
        _read_run(folder, label=label, num_runs=len(folders))
        for folder, label in zip(folders, _labels(folders), strict=True)
    ]


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _no_run(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder; give the run.output_dir of a run"
    if not any((folder / name).is_file() for name in (METRICS, CONFIG, EVALUATIONS, LEDGER)):
        return f"{folder}: holds no run (no {METRICS}, no {CONFIG}); give a run's run.output_dir"
    return ""


def _labels(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    paths = [folder.resolve() for folder in folders]
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{path.name} #{number}" for number, path in enumerate(paths, start=1)]


def _read_run(folder: Path, *, label: str, num_runs: int) -> RunData:
    run = RunData(folder=folder, label=label)
    lines = list(_json_lines(folder / METRICS, notes=run.notes))
    by_step = {row["step"]: row for row in lines}
    run.steps = [by_step[step] for step in sorted(by_step)]
    by_step = {row["step"]: row for row in _json_lines(folder / EVALUATIONS, notes=run.notes)}
    run.evaluations = [by_step[step] for step in sorted(by_step)]
    run.config = _read_config(folder / CONFIG, notes=run.notes)
    _read_memory(run)
    run.planned_gb = _read_plan(folder / PLAN, notes=run.notes)
    run.events = read_events(folder, steps=run.steps)
    run.samples = read_samples(folder / "rollouts", num_runs=num_runs)
    if not run.steps:
        run.notes.append(f"{METRICS} holds no step yet.")
    else:
        age = time.time() - (folder / METRICS).stat().st_mtime
        run.written_seconds_ago = max(age, 0.0)
    return run


def _json_lines(
    path: Path, *, notes: list[str], at_most_bytes: int | None = None, needed: bool = False
) -> Iterator[dict[str, Any]]:
    """The objects with a whole number `step` in a file of JSON lines; others are counted in a note.

    With at_most_bytes, only the whole lines of the file's end.
    """
    if not path.is_file():
        if needed:
            notes.append(f"{path.name} is missing.")
        return
    damaged, torn = 0, False
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if at_most_bytes is not None and size > at_most_bytes:
            file.seek(size - at_most_bytes)
            file.readline()
            notes.append(
                f"{path.name}: {size / 1e6:.0f} MB, of which the last {at_most_bytes / 1e6:.0f} MB "
                "are read here."
            )
        for line in file:
            row = _step_object(line)
            if row is not None:
                yield row
            elif not line.endswith(b"\n"):
                torn = True
            elif line.strip():
                damaged += 1
    if torn:
        notes.append(
            f"{path.name}: the last line is incomplete, as in a run that is being written or was "
            "killed; it is left out."
        )
    if damaged:
        notes.append(f"{path.name}: {damaged} damaged line{'s' * (damaged > 1)} left out.")


def _step_object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return row


def _read_memory(run: RunData) -> None:
    """Fill `peaks` from the ledger, and from the metrics where they have more."""
    of_rank: dict[str, dict[int, float]] = {}
    rows = _json_lines(
        run.folder / LEDGER, notes=run.notes, at_most_bytes=LARGEST_LEDGER_BYTES, needed=True
    )
    for row in _noting_idle_shares(rows, run=run):
        phase, rank, gb = row.get("phase"), row.get("rank"), finite(row.get("peak_gb"))
        if not isinstance(phase, str) or not isinstance(rank, int) or gb is None or phase == STEP:
            continue
        ranks = of_rank.setdefault(phase, {})
        ranks[rank] = max(ranks.get(rank, 0.0), gb)
        if phase not in run.peaks or gb > run.peaks[phase].gb:
            run.peaks[phase] = Peak(gb=gb, step=row["step"], rank=rank)
    for phase, ranks in of_rank.items():
        peak = run.peaks[phase]
        run.peaks[phase] = Peak(
            gb=peak.gb, step=peak.step, rank=peak.rank, least_rank_gb=min(ranks.values())
        )
    for key in run.keys("memory/"):
        phase = key.removeprefix("memory/").removesuffix("_peak_gb")
        if phase == STEP or not key.endswith("_peak_gb"):
            continue
        for record in run.steps:
            gb = finite(record.get(key))
            if gb is not None and (phase not in run.peaks or gb > run.peaks[phase].gb):
                run.peaks[phase] = Peak(gb=gb, step=record["step"], rank=None)


def _noting_idle_shares(rows: Iterator[dict[str, Any]], *, run: RunData) -> Iterator[Row]:
    """Pass the ledger's lines on, and fill `idle_shares` from them, step by step."""
    passed: list[Row] = []

    def records() -> Iterator[PhaseRecord | CommunicationRecord | None]:
        for row in rows:
            passed.append(row)
            yield record_of(row)

    for ledger in by_step(records()):
        shares = idle_shares(ledger.phases, communication=ledger.communication)
        step = ledger.phases[0].step if ledger.phases else 0
        if shares and step > 0:
            run.idle_shares[step] = shares
        yield from passed
        passed.clear()
    yield from passed


def _read_plan(path: Path, *, notes: list[str]) -> dict[str, float]:
    """Peak by phase, worst rank, in GB.

    Of {"phases": {"rollout": {"peak_gb": 12.3}}}, or of what `tools/plan_memory.py --json` prints,
    whose allocated_bytes are what the ledger's peak_gb measures.
    """
    if not path.is_file():
        return {}
    found = _read(path, parse=json.loads, notes=notes)
    planned: dict[str, float] = {}
    for phase, gb in _planned_peaks(found):
        if gb is not None and phase != STEP:
            planned[phase] = max(planned.get(phase, 0.0), gb)
    if not planned and found is not None:
        notes.append(f"{path.name} has no peaks of phases; the plan is not shown.")
    return planned


def _planned_peaks(plan: Any) -> Iterator[tuple[str, float | None]]:
    if not isinstance(plan, dict):
        return
    phases, ranks = plan.get("phases"), plan.get("ranks")
    for phase, entry in phases.items() if isinstance(phases, dict) else ():
        yield str(phase), finite(entry.get("peak_gb") if isinstance(entry, dict) else None)
    for rank in ranks if isinstance(ranks, list) else ():
        of_rank = rank.get("phases") if isinstance(rank, dict) else None
        for entry in of_rank if isinstance(of_rank, list) else ():
            num_bytes = finite(entry.get("allocated_bytes") if isinstance(entry, dict) else None)
            if num_bytes is not None:
                yield str(entry.get("phase")), num_bytes / GB


def _read_config(path: Path, *, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        notes.append(f"{path.name} is missing.")
        return {}
    found = _read(path, parse=yaml.safe_load, notes=notes)
    return redact_tree(found) if isinstance(found, dict) else {}


def _read(path: Path, *, parse: Callable[[str], Any], notes: list[str]) -> Any:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read: {redact_text(str(error))}")
        return None
