"""The ranks of one node, from one command."""

import os
import signal
import sys
import threading
import time

import pytest

from rlhf_megatron.launcher import PASSED_ON, PORTS, free_port, launch

RANK_2_FAILS = "import os, sys; sys.exit(7 if os.environ['RANK'] == '2' else 0)"
ENDS_BY_SIGNAL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
STOPS = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
open(sys.argv[1], "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("text", "code"), [("", 0), (RANK_2_FAILS, 7), (ENDS_BY_SIGNAL, 128 + signal.SIGKILL)]
)
def test_the_exit_code_is_that_of_the_first_rank_that_failed(text: str, code: int) -> None:
    assert launch([sys.executable, "-c", text], num_processes=3) == code


def test_a_signal_goes_to_the_rank_and_the_handlers_are_put_back(tmp_path) -> None:
    before = {number: signal.getsignal(number) for number in PASSED_ON}
    ready = tmp_path / "ready"

    def send() -> None:
        while not ready.exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=send)
    thread.start()
    assert launch([sys.executable, "-c", STOPS, str(ready)], num_processes=1) == 3
    thread.join()
    assert {number: signal.getsignal(number) for number in PASSED_ON} == before


def test_ports_are_not_those_of_outgoing_connections() -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1 and all(port in PORTS for port in ports)
