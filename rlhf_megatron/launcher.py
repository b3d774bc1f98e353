"""Start the ranks of one node from one command, and end with their exit code.

torchrun does the same for clusters, but answers any failure with exit code 1 and a page of its own;
here a bad configuration ends as the one line that the trainer prints, with exit code 2.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

GRACE_SECONDS = 20.0
"""How long the other ranks may take to leave by themselves once one has failed."""


def free_port() -> int:
    """A TCP port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(command: Sequence[str], *, num_processes: int) -> int:
    """Run `command` once per rank; returns 0, or the exit code of the first rank that failed.

    SIGINT, SIGTERM and SIGUSR1 are passed on to the ranks.
    """
    common = os.environ | {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    common.setdefault("OMP_NUM_THREADS", "1")
    ranks = [
        subprocess.Popen(command, env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_processes)
    ]

    def pass_on(number: int, _: object) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    try:
        return _wait(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()


def _wait(ranks: Sequence[subprocess.Popen]) -> int:
    first_failure = 0
    deadline = None
    while any(process.poll() is None for process in ranks):
        codes = [process.poll() for process in ranks]
        failed = [code for code in codes if code]
        if failed and deadline is None:
            first_failure = failed[0]
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.1)
    codes = [process.poll() for process in ranks]
    first_failure = first_failure or next((code for code in codes if code), 0)
    # A rank ended by a signal has a negative code; a shell knows it as 128 + the signal.
    return 128 - first_failure if first_failure < 0 else first_failure


def training_command(arguments: Sequence[str]) -> list[str]:
    """The command of one rank."""
    return [sys.executable, "-m", "rlhf_megatron.main", *arguments]
