"""RUN/slurm/job_12.jsonl: a line for each start of a job that its script has seen end."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Start:
    """One start of a job."""

    restarts: int
    began: str
    """ISO 8601, as `ended`."""
    ended: str
    nodes: tuple[str, ...]
    bad_nodes: tuple[str, ...]
    exit_code: int
    checkpoint_before: str
    """What checkpoints/latest named when it began; "" for none."""
    checkpoint_after: str
    requeue: bool
    reason: str

    @property
    def is_fruitless(self) -> bool:
        """Whether it has brought no new checkpoint."""
        return self.checkpoint_before == self.checkpoint_after


class History:
    """The starts of one job so far."""

    def __init__(self, run: Path, *, job: str) -> None:
        self._path = run / "slurm" / f"job_{job}.jsonl"

    def num_fruitless(self) -> int:
        """How many of the last starts, up to the last one, have brought no new checkpoint."""
        number = 0
        for start in reversed(self.starts()):
            if not start.is_fruitless:
                break
            number += 1
        return number

    def starts(self) -> list[Start]:
        """Oldest first. A line that a crash has cut short is left out."""
        if not self._path.exists():
            return []
        found = []
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                fields: dict[str, Any] = json.loads(line)
                lists = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
                found.append(Start(**(fields | lists)))
            except (ValueError, TypeError, AttributeError):
                continue
        return found

    def add(self, start: Start) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(start)) + "\n")


def current_checkpoint(run: Path) -> str:
    """What the marker names; "" where there is none."""
    try:
        return (run / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def now() -> str:
    """ISO 8601 to the second, local time with its offset, as Slurm's own lines are local."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
