"""Reading ledger.jsonl again: step by step, of any version, also of a run that was killed."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlhf_megatron.observability.ledger import (
    CommunicationRecord,
    PhaseRecord,
    StepLedger,
)

_FIELDS = {
    kind: {field.name: field.type for field in fields(kind)}
    for kind in (PhaseRecord, CommunicationRecord)
}


def record_of(row: Any) -> PhaseRecord | CommunicationRecord | None:
    """A line as the record it was. Fields that an older version did not write have their defaults,
    unknown ones are dropped; None for what is no record."""
    if not isinstance(row, dict):
        return None
    kind = PhaseRecord if "phase" in row else CommunicationRecord
    types = _FIELDS[kind]
    values = {name: value for name, value in row.items() if name in types}
    if not all(_is_a(types[name], value=value) for name, value in values.items()):
        return None
    try:
        return kind(**values)
    except TypeError:  # a field is missing
        return None


def _is_a(kind: Any, *, value: Any) -> bool:
    if kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    return isinstance(value, kind) and not isinstance(value, bool)


def by_step(
    records: Iterable[PhaseRecord | CommunicationRecord | None],
) -> Iterator[StepLedger]:
    """The records of each step, put together as they come: the file is in the steps' order."""
    current, step = StepLedger(), None
    for record in records:
        if record is None:
            continue
        if step is not None and record.step != step:
            yield current
            current = StepLedger()
        step = record.step
        if isinstance(record, PhaseRecord):
            current.phases.append(record)
        else:
            current.communication.append(record)
    if step is not None:
        yield current


def read_steps(path: Path, *, last_step: int | None = None) -> Iterator[StepLedger]:
    """The records of each step, all ranks. Damaged lines are left out. Ends after `last_step`,
    without reading what follows."""
    return by_step(_records(path, last_step=last_step))


def _records(
    path: Path, *, last_step: int | None
) -> Iterator[PhaseRecord | CommunicationRecord | None]:
    with path.open("rb") as file:
        for line in file:
            try:
                record = record_of(json.loads(line))
            except ValueError:  # half a line of a killed run
                continue
            if last_step is not None and record is not None and record.step > last_step:
                return
            yield record
