"""What happened in a run beside its steps: resumes, checkpoints, skipped updates, warnings.

Read from rank 0's log, whose lines logs.py formats, and from the metrics. The log keeps what a
resume cuts away from the other files, so a step can appear in it twice.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rlhf_megatron.observability.redact import redact_text

LARGEST_LOG_BYTES = 5_000_000
LONGEST_TEXT = 400

RESUME, CHECKPOINT, SKIPPED, PROBLEM = "resume", "checkpoint", "skipped", "problem"

_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,\d+)? rank \d+ (?P<level>[A-Z]+) "
    r"(?P<logger>[\w.]+): (?P<text>.*)"
)
_KINDS = (
    (RESUME, re.compile(r"resuming from .*, step (?P<step>\d+)")),
    (SKIPPED, re.compile(r"skipped: \w+ of step (?P<step>\d+)")),
    (CHECKPOINT, re.compile(r"wrote .*step_(?P<step>\d+)\b")),
)


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the list of events."""

    kind: str
    text: str
    step: int | None = None
    when: datetime | None = None


def read_events(folder: Path, *, steps: Sequence[Mapping[str, Any]]) -> list[Event]:
    """The events of the run in `folder`, oldest first; `steps`: the lines of its metrics.jsonl."""
    events = _from_log(folder / "logs" / "rank_0000.log")
    inside = f"{folder.resolve()}/"
    events = [replace(event, text=event.text.replace(inside, "")) for event in events]
    told = {event.step for event in events if event.kind == SKIPPED}
    events += [
        Event(
            kind=SKIPPED,
            step=row["step"],
            text=f"{row['faults/skipped_updates']:g} updates were skipped",
        )
        for row in steps
        if row.get("faults/skipped_updates") and row["step"] not in told
    ]
    return events


def _from_log(path: Path) -> list[Event]:
    events = []
    for line in _lines(path):
        # Python's own warnings are about the code of libraries, and there are dozens.
        is_problem = line["level"] in ("WARNING", "ERROR", "CRITICAL")
        if is_problem and line["logger"] == "py.warnings":
            continue
        text = redact_text(line["text"])
        text = text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " ..."
        when = _time(line["time"])
        for kind, pattern in _KINDS:
            found = pattern.match(line["text"])
            if found:
                events.append(Event(kind=kind, step=int(found["step"]), text=text, when=when))
                break
        else:
            if is_problem:
                text = f"{line['level'].lower()}: {text}"
                events.append(Event(kind=PROBLEM, text=text, when=when))
    return events


def _lines(path: Path) -> list[dict[str, str]]:
    """The log's lines that begin a record; of a long log those of its end."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - LARGEST_LOG_BYTES, 0))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    found = (_LINE.match(line) for line in text.splitlines())
    return [match.groupdict() for match in found if match]


def _time(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S")
