"""Rows of a JSONL or Parquet file, each with the place it came from."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import UserError

MAX_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row. `number` counts rows from 0; `place` is how a person finds it in the file."""

    number: int
    place: str
    values: dict[str, Any]


def read_rows(path: Path, *, key: str) -> list[Row]:
    """All rows of `path`; `key` is the option that named it, for messages.

    Raises UserError for a missing, unreadable or empty file and for lines that are no JSON object.
    """
    if not path.is_file():
        raise UserError(f"{key}={str(path)!r}: no such file; give a .jsonl or .parquet file")
    if path.suffix == ".jsonl":
        rows = _read_jsonl(path, key=key)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path, key=key)
    else:
        raise UserError(f"{key}={str(path)!r}: the name must end in .jsonl or .parquet")
    if not rows:
        raise UserError(f"{key}={str(path)!r}: the file is empty; it needs at least one row")
    return rows


def refuse_rows(path: Path, *, key: str, problems: list[str]) -> None:
    """Raise one UserError with the first few problems and their number, if there are any."""
    if not problems:
        return
    listed = "".join(f"\n  - {problem}" for problem in problems[:MAX_LISTED])
    more = len(problems) - MAX_LISTED
    rest = f"\n  - and {more} more" if more > 0 else ""
    count = "1 row is" if len(problems) == 1 else f"{len(problems)} rows are"
    raise UserError(f"{key}={str(path)!r}: {count} refused{listed}{rest}")


def _read_jsonl(path: Path, *, key: str) -> list[Row]:
    rows: list[Row] = []
    problems: list[str] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{key}={str(path)!r}: not UTF-8 text ({error})") from error
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            problems.append(f"line {line_number}: bad JSON: {error.msg} at column {error.colno}")
            continue
        if not isinstance(values, dict):
            kind = type(values).__name__
            problems.append(f"line {line_number}: of type {kind}, must be an object")
            continue
        rows.append(Row(number=len(rows), place=f"line {line_number}", values=values))
    refuse_rows(path, key=key, problems=problems)
    return rows


def _read_parquet(path: Path, *, key: str) -> list[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"{key}={str(path)!r}: reading Parquet needs pyarrow; install it or use .jsonl"
        ) from error
    try:
        values = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{key}={str(path)!r}: not a Parquet file ({error})") from error
    return [Row(number=i, place=f"row {i}", values=row) for i, row in enumerate(values)]
