"""Error agreement: any rank's exception ends the job on all ranks, with that rank's message.

A rank that fails writes its error to the job's key-value store; the first one wins. A thread on
every rank watches the key, because a rank that waits in a collective cannot be woken otherwise.
Rank 0 prints the message, once, and every rank leaves with the exit code that belongs to it.
"""

import json
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_FAILED, UserError

POLL_SECONDS = 0.2
ACKNOWLEDGE_SECONDS = 10.0

_KEY = "rlhf_megatron/failure"
_SHOWN = "rlhf_megatron/failure_shown"


class FailureChannel:
    """The watch over the job's peers; `start` it once torch.distributed is initialised."""

    def __init__(
        self, *, rank: int, world_size: int, current_phase: Callable[[], str] = lambda: "start"
    ) -> None:
        self.rank = rank
        self.current_phase = current_phase
        self.clean_up: Callable[[], None] = lambda: None
        """What rank 0 does before it leaves after a failure, such as to remove unfinished files."""
        # A connection of its own: the default store's is busy while the main thread rendezvouses.
        self._store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
        )
        self._world_size = world_size
        self._closing = threading.Event()
        self._leaving = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop watching; called when the job is over on all ranks."""
        self._closing.set()

    def report(self, error: BaseException) -> NoReturn:
        """Publish this rank's error (unless another was first) and leave the process."""
        user = isinstance(error, UserError)
        silent = user or isinstance(error, KeyboardInterrupt)
        failure = {
            "rank": self.rank,
            "phase": self.current_phase(),
            "exit_code": EXIT_BAD_INPUT if user else EXIT_FAILED,
            "message": str(error) if user else f"{type(error).__name__}: {error}".rstrip(": "),
            "traceback": "" if silent else "".join(traceback.format_exception(error)),
        }
        try:
            self._store.compare_set(_KEY, "", json.dumps(failure))
            first = json.loads(self._store.get(_KEY))
        except Exception:  # the store's host is gone: say it here, where it can still be said
            _show(failure)
            _leave(int(failure["exit_code"]))  # type: ignore[call-overload]
        self._leave_with(first)

    def _watch(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            try:
                if self._store.check([_KEY]):
                    self._leave_with(json.loads(self._store.get(_KEY)))
            except Exception:
                if self._closing.is_set():
                    return
                # The store lives in the launcher or in rank 0: it is gone, and so is the job.
                logging.getLogger(__name__).error("the job's store is gone; leaving")
                _leave(EXIT_FAILED)

    def _leave_with(self, failure: dict) -> NoReturn:
        with self._leaving:  # the main thread and the watch may both arrive
            if self.rank == 0:
                _show(failure)
                self._clean_up()
                self._store.set(_SHOWN, "1")
                time.sleep(5 * POLL_SECONDS)  # rank 0 may host the store: let the others read it
            else:
                self._wait_until_shown()
            _leave(int(failure["exit_code"]))

    def _clean_up(self) -> None:
        try:
            self.clean_up()
        except Exception as error:
            logging.getLogger(__name__).error("could not clean up: %s", error)

    def _wait_until_shown(self) -> None:
        """A launcher kills all ranks when one leaves: rank 0 has to print first."""
        try:
            self._store.wait([_SHOWN], timedelta(seconds=ACKNOWLEDGE_SECONDS))
        except Exception:
            logging.getLogger(__name__).error("rank 0 did not show the failure in time")


def _show(failure: dict) -> None:
    if failure["traceback"]:
        print(
            f"error: rank {failure['rank']} failed in {failure['phase']}: "
            f"{failure['message']}\n{failure['traceback']}",
            file=sys.stderr,
        )
    else:
        print(f"error: {failure['message']}", file=sys.stderr)


def _leave(exit_code: int) -> NoReturn:
    for child in multiprocessing.active_children():  # os._exit would leave them behind
        child.kill()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
