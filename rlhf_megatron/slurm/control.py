"""What this job asks of Slurm, and tells it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass

from rlhf_megatron.slurm.hosts import expand_hostlist

UPDATE_SECONDS = 20.0
"""How long to try to exclude nodes. A requeued job's script is killed KillWait after its requeue
(30 s by default)."""


@dataclass(frozen=True)
class JobState:
    """Of `scontrol show job`."""

    name: str
    """RUNNING; COMPLETING as soon as it is cancelled or over its limit; "" for no answer."""
    reason: str
    """TimeLimit where it is over its limit; mostly None."""


class Scontrol:
    """`scontrol`, for one job."""

    def __init__(self, job: str) -> None:
        self._job = job

    def state(self) -> JobState:
        """What Slurm thinks of the job at the moment."""
        shown = self._show()
        return JobState(shown.get("JobState", ""), shown.get("Reason", ""))

    def end_seconds(self) -> float | None:
        """When the time limit is up, in seconds since 1970; None where there is none."""
        try:
            return time.mktime(time.strptime(self._show().get("EndTime", ""), "%Y-%m-%dT%H:%M:%S"))
        except (ValueError, OverflowError):
            return None

    def requeue(self) -> str:
        """Put the job back into the queue, which ends this start of it. Returns what scontrol has
        against it; "" if nothing."""
        return _run("requeue", self._job).error

    def exclude(self, nodes: Iterable[str]) -> str:
        """Keep the job, which is in the queue again, off these nodes, beside those that it keeps
        off already. Returns what scontrol has against it; "" if nothing."""
        deadline = time.monotonic() + UPDATE_SECONDS
        while True:
            before = self._show().get("ExcNodeList", "(null)")
            names = set() if before == "(null)" else set(expand_hostlist(before))
            listed = ",".join(sorted(names.union(nodes)))
            error = _run("update", f"JobId={self._job}", f"ExcNodeList={listed}").error
            if not error or time.monotonic() > deadline:
                return error
            time.sleep(1.0)

    def address_of(self, node: str) -> str:
        """Under which the other nodes reach it: its name, where that can be looked up, else the
        address that Slurm itself uses."""
        try:
            socket.getaddrinfo(node, None)
            return node
        except OSError:
            return _words(_run("show", "node", node).text).get("NodeAddr", node)

    def _show(self) -> dict[str, str]:
        return _words(_run("show", "job", self._job).text)


class _Answer:
    def __init__(self, *, text: str, error: str) -> None:
        self.text, self.error = text, error


def _run(*words: str) -> _Answer:
    try:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return _Answer(text="", error=str(error))
    failed = done.returncode != 0
    return _Answer(text=done.stdout, error=(done.stderr.strip() or "failed") if failed else "")


def _words(text: str) -> dict[str, str]:
    """KEY=VALUE, the first of each key."""
    found: dict[str, str] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if equals:
            found.setdefault(key, value)
    return found
