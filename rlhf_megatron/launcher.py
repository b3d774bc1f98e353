"""Start the ranks of one node from one command, and end with their exit code.

torchrun does the same for clusters, but answers any failure with exit code 1 and a page of its own;
here a bad configuration ends as the one line that the trainer prints, with exit code 2.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

GRACE_SECONDS = 20.0
"""How long the other ranks may take to leave by themselves once one has failed."""


PORTS = range(20000, 32000)
"""Below those that systems give to outgoing connections (32768 and up on Linux): of these, another
program may have taken one by the time that rank 0, some seconds later, listens."""


def free_port() -> int:
    """A TCP port that is free at the moment, at random, so that jobs that start at once differ."""
    chooser = random.SystemRandom()  # seeded runs begin alike
    for _ in range(1000):
        port = chooser.choice(PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port from {PORTS.start} to {PORTS.stop - 1}")


def launch(command: Sequence[str], *, num_processes: int) -> int:
    """Run `command` once per rank; returns 0, or the exit code of the first rank that failed.

    While they run, the signals of PASSED_ON go to the ranks.
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

    former = {number: signal.signal(number, pass_on) for number in PASSED_ON}
    try:
        return _wait(ranks)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
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
