"""A process that scores for a rank: `python -m rlhf_megatron.rewards.worker FD PARENT`.

It is a fresh interpreter, so it has nothing of the rank's: no CUDA context, no process group, no
lock. FD is its end of a socket, on which it gets a WorkerSetup and then one ScoringInput after the
other, pickled by the rank. What goes back is JSON, so that a reward cannot run code in the rank.
"""

import ctypes
import faulthandler
import json
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rlhf_megatron.errors import UserError
from rlhf_megatron.rewards.contract import failure_reason
from rlhf_megatron.rewards.function import FunctionScorer, check_arguments, load_reward_function

_PR_SET_PDEATHSIG = 1
_SIGNALS_OF_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """What a worker is to load."""

    function: str
    """As in reward.function."""
    fields: tuple[str, ...] | None
    """Names of the prompt rows' other fields; None where they are not known beforehand."""
    path: tuple[str, ...]
    """The rank's sys.path: both find the same modules."""


def main() -> None:
    """Serve until the rank closes its end."""
    _end_with_the_rank(int(sys.argv[2]))
    # A signal to the whole job asks the ranks to stop, who still want their scores. A handler that
    # does nothing, since programs that a reward starts would inherit SIG_IGN.
    for number in _SIGNALS_OF_THE_RUN:
        signal.signal(number, lambda *_: None)
    faulthandler.enable()
    connection = Connection(int(sys.argv[1]))
    setup: WorkerSetup = pickle.loads(connection.recv_bytes())
    sys.path[:] = setup.path
    try:
        function = load_reward_function(setup.function)
        if setup.fields is not None:
            check_arguments(function, spec=setup.function, fields=setup.fields)
    except UserError as error:
        _send(connection, {"refused": str(error)})
        return
    _send(connection, {"ready": True})
    score = FunctionScorer(function)  # the rank sees to the time limit
    while True:
        try:
            sample = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        (outcome,) = score([sample])
        reason = failure_reason(outcome)
        _send(connection, {"score": float(outcome)} if reason is None else {"reason": reason})


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _end_with_the_rank(parent: int) -> None:
    """Have the kernel kill this process when the rank's thread that started it ends: a closed
    socket is not seen by a reward that hangs."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
