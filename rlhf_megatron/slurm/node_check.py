"""A quick check of each node before the training starts, and the list of those that failed one."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.slurm.history import now

EXIT_NO_GO = 1
"""With this exit code the check says that the node is not fit."""
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class CheckResult:
    """What the checks of all nodes came to."""

    bad: tuple[str, ...]
    """Nodes that are not fit, or whose check did not end in time."""
    unknown: Mapping[str, int]
    """Nodes whose check could not be run, with its exit code."""
    interrupted: bool = False
    """Whether the checks were given up on request."""


def check_nodes(
    commands: Mapping[str, Sequence[str]],
    *,
    logs: Path,
    timeout_seconds: float,
    interrupted: Callable[[], bool],
) -> CheckResult:
    """Run each node's command, all at once; logs: where they write check_NODE.txt. Does not raise
    where one fails."""
    running = {node: subprocess.Popen(command) for node, command in commands.items()}
    deadline = time.monotonic() + timeout_seconds
    try:
        while any(process.poll() is None for process in running.values()):
            if interrupted():
                return CheckResult((), {}, interrupted=True)
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        codes = {node: process.poll() for node, process in running.items()}
    finally:
        _end(running.values())
    bad = [node for node, code in codes.items() if code is None or code == EXIT_NO_GO]
    # Python ends with the same exit code where, say, a package is missing: no fault of the node.
    bad = [node for node in bad if "Traceback (most recent call" not in report(node, logs=logs)]
    unknown = {node: code for node, code in codes.items() if code and node not in bad}
    return CheckResult(tuple(bad), unknown)


def report(node: str, *, logs: Path) -> str:
    """What the check of the node has printed; "" if nothing."""
    try:
        return (logs / f"check_{node}.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _end(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()  # srun ends its step
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


class BadNodes:
    """A file with a line for each node that did not pass: its name, when, and in which job. Later
    starts keep off them; a person removes the line of a node that is mended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def among(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Those of the nodes that are listed."""
        if not self.path.exists():
            return ()
        lines = self.path.read_text(encoding="utf-8").splitlines()
        listed = {line.split()[0] for line in lines if line.strip() and not line.startswith("#")}
        return tuple(node for node in nodes if node in listed)

    def add(self, nodes: Sequence[str], *, job: str, logs: Path) -> None:
        new = [node for node in nodes if node not in self.among(nodes)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{node} {now()} job {job}, {logs}/check_{node}.txt\n" for node in new)
