"""trace.json: every rank's phases on a timeline, for ui.perfetto.dev or chrome://tracing.

The format is Chrome's trace event format (JSON object form): a process per rank with a track of its
phases and one of whole steps, complete events ("X"), times in microseconds since the first of them.
Made from ledger.jsonl alone.
"""

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import UserError
from rlhf_megatron.observability.config import parse_steps
from rlhf_megatron.observability.ledger import (
    LEDGER_FILE,
    STEP,
    CommunicationRecord,
    PhaseRecord,
    StepLedger,
)
from rlhf_megatron.observability.ledger_read import read_steps

logger = logging.getLogger(__name__)

TRACE = "trace.json"
MOST_EVENTS = 200_000
"""Of the file that a run writes as it ends: about 60 MB."""
PHASES_TRACK, STEPS_TRACK = 0, 1
_TRACK_NAMES = {PHASES_TRACK: "phases", STEPS_TRACK: "steps"}
_MEMORY = ("entry_gb", "allocated_gb", "peak_gb", "reserved_gb")

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class WrittenTrace:
    """A trace that was written."""

    path: Path
    num_bytes: int
    num_events: int
    """Metadata not counted."""
    num_ranks: int
    steps: tuple[int, int]
    """First and last."""
    steps_left_out: int
    """Wanted, but beyond the most events."""
    untimed: int
    """Records of older versions, which have no time of entry and are left out."""

    def __str__(self) -> str:
        text = (
            f"wrote {self.path}: steps {self.steps[0]} to {self.steps[1]}, {self.num_ranks} "
            f"rank{'s' * (self.num_ranks > 1)}, {self.num_events} events, "
            f"{self.num_bytes / 1e6:.1f} MB"
        )
        if self.steps_left_out:
            text += f"; {self.steps_left_out} further steps are left out, to keep it small"
        if self.untimed:
            text += f"; {self.untimed} records have no time of entry and are left out"
        return text


def write_trace(
    folder: Path, *, steps: str = "all", output: Path | None = None, most_events: int | None = None
) -> WrittenTrace:
    """Write the trace of the run in `folder`; it appears whole or not at all.

    `steps`: as logging.trace_steps. `output`: by default trace.json in the run's folder. Raises
    UserError where the ledger is missing or has none of the steps with times, OSError.
    """
    try:
        wanted = parse_steps(steps)
    except ValueError as error:
        raise UserError(f'steps {steps}: {error}; give "all", or such as 1-20,500') from None
    ledger = folder / LEDGER_FILE
    if not ledger.is_file():
        raise UserError(f"{ledger}: no such file; give the run.output_dir of a run that has begun")
    selection = _select(ledger, wanted=wanted, most_events=most_events)
    if not selection.ledgers:
        raise UserError(_nothing(ledger, steps=steps, untimed=selection.untimed))
    origin = min(r.start_unix_seconds for part in selection.ledgers for r in part.phases)
    path = output if output is not None else folder / TRACE
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", ')
            file.write(f'"otherData": {{"started_unix_seconds": {origin!r}}}, "traceEvents": [\n')
            events = _events(selection.ledgers, origin=origin)
            for number, event in enumerate(events):
                file.write((",\n" if number else "") + json.dumps(event))
            file.write("\n]}\n")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    shown = [part.phases[0].step for part in selection.ledgers]
    return WrittenTrace(
        path=path,
        num_bytes=path.stat().st_size,
        num_events=sum(len(part.phases) for part in selection.ledgers),
        num_ranks=len({record.rank for part in selection.ledgers for record in part.phases}),
        steps=(shown[0], shown[-1]),
        steps_left_out=selection.left_out,
        untimed=selection.untimed,
    )


def trace_at_end(folder: Path, *, steps: str) -> WrittenTrace | None:
    """Write the trace of a run that is ending; where that fails, warn and return None: the run
    itself is done and saved. `steps`: logging.trace_steps."""
    if not steps.strip():
        return None
    try:
        written = write_trace(folder, steps=steps, most_events=MOST_EVENTS)
    except UserError as error:  # a run that was stopped before any of them
        logger.info("%s was not written: %s", TRACE, error)
        return None
    except Exception as error:
        again = f"python tools/trace.py {folder}"
        logger.warning("%s was not written: %r; try again with `%s`", TRACE, error, again)
        return None
    logger.info("%s", written)
    return written


@dataclass(kw_only=True)
class _Selection:
    ledgers: list[StepLedger]
    """By step; phases with a time of entry only."""
    left_out: int = 0
    untimed: int = 0


def _select(path: Path, *, wanted: list[range] | None, most_events: int | None) -> _Selection:
    found, num_events = _Selection(ledgers=[]), 0
    last_step = None if wanted is None else max((part.stop - 1 for part in wanted), default=-1)
    for ledger in read_steps(path, last_step=last_step):
        if not ledger.phases:
            continue
        step = ledger.phases[0].step
        if wanted is not None and not any(step in part for part in wanted):
            continue
        timed = [record for record in ledger.phases if record.start_unix_seconds]
        found.untimed += len(ledger.phases) - len(timed)
        num_events += len(timed)
        if most_events is not None and num_events > most_events:
            found.left_out += 1
        elif timed:
            found.ledgers.append(StepLedger(timed, ledger.communication))
    return found


def _nothing(ledger: Path, *, steps: str, untimed: int) -> str:
    if untimed:
        return (
            f"{ledger}: written by an older version, without the times at which phases began; a "
            "timeline needs a run of this version"
        )
    return f"{ledger}: holds none of the steps {steps or 'asked for'}; give others, or all"


def _events(ledgers: Sequence[StepLedger], *, origin: float) -> Iterator[Event]:
    hosts = {r.rank: r.host for part in ledgers for r in part.phases if r.host}
    for rank in sorted({record.rank for part in ledgers for record in part.phases}):
        yield from _metadata(rank, host=hosts.get(rank, ""))
    for part in ledgers:
        moved = _by_phase(part.communication)
        for record in part.phases:
            yield _complete_event(
                record,
                origin=origin,
                # The totals of a phase's passages in a step: beside the first of them.
                communication=moved.pop((record.rank, record.phase), ()),
            )


def _metadata(rank: int, *, host: str) -> Iterator[Event]:
    def event(what: str, *, thread: int = PHASES_TRACK, **arguments: Any) -> Event:
        return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": arguments}

    yield event("process_name", name=f"rank {rank}" + (f" ({host})" if host else ""))
    yield event("process_sort_index", sort_index=rank)
    for thread, name in _TRACK_NAMES.items():
        yield event("thread_name", thread=thread, name=name)


def _complete_event(
    record: PhaseRecord, *, origin: float, communication: Iterable[CommunicationRecord]
) -> Event:
    is_step = record.phase == STEP
    arguments: dict[str, Any] = {"step": record.step, "phase": record.phase}
    arguments |= {name: round(getattr(record, name), 6) for name in _MEMORY}
    for moved in communication:
        name = " ".join(word for word in (moved.purpose, moved.collective) if word)
        arguments[f"{name} bytes"] = moved.bytes
        arguments[f"{name} calls"] = moved.calls
        arguments[f"{name} seconds"] = round(moved.seconds, 6)
    return {
        "ph": "X",
        "name": f"step {record.step}" if is_step else record.phase,
        "cat": STEP if is_step else "phase",
        "ts": round((record.start_unix_seconds - origin) * 1e6),
        "dur": round(record.seconds * 1e6),
        "pid": record.rank,
        "tid": STEPS_TRACK if is_step else PHASES_TRACK,
        "args": arguments,
    }


def _by_phase(
    communication: Iterable[CommunicationRecord],
) -> dict[tuple[int, str], list[CommunicationRecord]]:
    found: dict[tuple[int, str], list[CommunicationRecord]] = {}
    for record in communication:
        found.setdefault((record.rank, record.during_phase or STEP), []).append(record)
    return found
