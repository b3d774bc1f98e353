"""A small process beside each rank, which takes over the rank's watch while the rank cannot watch.

The watch of failure.py is a thread, and no thread of Python runs while a call outside Python keeps
the interpreter locked. Drivers do that: a kernel's loading waits until the GPU is done, and the GPU
waits in a collective for a rank that has died (seen with torch 2.11's launcher of Triton kernels).
So the rank tells this process, about every second, where it is; when it falls silent without being
stopped, this process watches in its place, with the same messages (held_rank.py), and ends it with
SIGKILL where the job is to end.

Until then it imports nothing but the standard library: it sleeps, in about 10 MB.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HELD_SECONDS = 6.0
"""A rank silent for so long is held up; one that is only slow costs a look at the store. Launchers
that have seen a rank die leave the others 20 seconds or more."""
TELL_SECONDS = 1.0
STACKS_SIGNAL = signal.SIGUSR2
"""Makes a rank write its threads' stacks, without the interpreter's lock (faulthandler)."""

_LONGEST_STEP_SECONDS = 2.0
"""This process was itself held up for longer (a suspended job): no silence of the rank's."""
_END = b"end\n"
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Meant for the rank; this process ends with it."""


class StandIn:
    """The rank's end: tells the process beside it where the rank is. Of any thread."""

    def __init__(self, *, rank: int, world_size: int, silent_seconds: float) -> None:
        """Raises OSError where no process can be started."""
        options = {
            "rank": rank,
            "world_size": world_size,
            "silent_seconds": silent_seconds,
            "parent": os.getpid(),
        }
        paths = [path for path in sys.path if path]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(options)],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._told_at = 0.0

    def tell(self, **state: Any) -> None:
        """That this rank runs, and the arguments of held_rank.HeldRank; at most every second."""
        now = time.monotonic()
        if now - self._told_at >= TELL_SECONDS:
            self._told_at = now
            self._write(json.dumps(state).encode() + b"\n")

    def close(self) -> None:
        """The rank needs it no more."""
        self._write(_END)

    def _write(self, line: bytes) -> None:
        # Lines are shorter than PIPE_BUF: all of one goes in, or nothing where the pipe is full.
        # A process that is gone is missed by nobody.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipe, line)


def main() -> None:
    """The process: until the rank ends, or says that it needs it no more."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    options = json.loads(sys.argv[1])
    parent = options.pop("parent")
    state: dict[str, Any] | None = None
    silent_seconds, looked_at, is_watching = 0.0, time.monotonic(), False
    while os.getppid() == parent:
        is_ready = bool(select.select([0], [], [], TELL_SECONDS)[0])
        now = time.monotonic()
        silent_seconds += min(now - looked_at, _LONGEST_STEP_SECONDS)
        looked_at = now
        if is_ready:
            data = os.read(0, 1 << 16)
            if not data or data.endswith(_END):
                return
            if is_watching:  # the rank watches again: forget all, with what was imported
                os.execv(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]])
            state, silent_seconds = json.loads(data.splitlines()[-1]), 0.0
        if _is_stopped(parent):  # the others see that, and it may be meant
            silent_seconds = 0.0
        if silent_seconds >= HELD_SECONDS and state is not None and not is_watching:
            from rlhf_megatron.distributed.held_rank import HeldRank

            HeldRank(process=parent, **options, **state).start()
            is_watching, looked_at = True, time.monotonic()


def _is_stopped(pid: int) -> bool:
    """Whether the process stands still by a signal or under a debugger."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


if __name__ == "__main__":
    main()
    os._exit(0)  # threads of a watch may be in calls to the store
