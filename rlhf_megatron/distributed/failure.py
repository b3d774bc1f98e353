"""Error agreement: any rank's exception ends the job on all ranks, with that rank's message.

A rank that fails writes its error to the job's key-value store; the first one wins. A thread on
every rank watches the key, because a rank that waits in a collective cannot be woken otherwise.
Rank 0 prints the message, once, and every rank leaves with the exit code that belongs to it. For a
rank that was killed its neighbour writes the error (heartbeat.py).
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

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from rlhf_megatron.distributed.heartbeat import Heartbeat
from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_FAILED, UserError

POLL_SECONDS = 0.2
ACKNOWLEDGE_SECONDS = 10.0
SILENT_SECONDS = 600.0
"""Without a sign of life for so long, a rank on another node counts as dead."""
DEATH_WAIT_SECONDS = 2.0
"""When a peer dies, collectives fail on the others: so long they wait for its neighbour's word."""

_KEY = "failure"
_SHOWN = "failure_shown"


class FailureChannel:
    """The watch over the job's peers; `start` it once torch.distributed is initialised."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        current_phase: Callable[[], str] = lambda: "start",
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self.rank = rank
        self.current_phase = current_phase
        self.clean_up: Callable[[], None] = lambda: None
        """What rank 0 does before it leaves after a failure, such as to remove unfinished files."""
        # A connection of its own: the default store's is busy while the main thread rendezvouses.
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
        )
        # torchrun keeps its store through restarts: what failed the last time is in it still.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"rlhf_megatron/attempt_{attempt}", store)
        self._heartbeat = Heartbeat(
            self._store, rank=rank, world_size=world_size, silent_seconds=silent_seconds
        )
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
            "shown_by": 0,
        }
        try:
            if _comes_from_a_peer(error):
                self._wait_for_word_of_a_death()
            first = self._publish(failure)
        except Exception:  # the store's host is gone: say it here, where it can still be said
            if _comes_from_a_peer(error):
                self._leave_without_store()
            _show(failure)
            _leave(int(failure["exit_code"]))  # type: ignore[call-overload]
        self._leave_with(first)

    def _publish(self, failure: dict) -> dict:
        """Write the failure, unless there is one; returns the one that stands."""
        self._store.compare_set(_KEY, "", json.dumps(failure))
        return dict(json.loads(self._store.get(_KEY)))

    def _watch(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            try:
                if self._store.check([_KEY]):
                    self._leave_with(json.loads(self._store.get(_KEY)))
                self._heartbeat.beat(self.current_phase())
                death = self._heartbeat.death()
                if death and not self._closing.is_set():
                    self._leave_with(self._publish(self._obituary(death)))
            except Exception:
                if self._closing.is_set():
                    return
                self._leave_without_store()

    def _obituary(self, death: str) -> dict:
        dead = self._heartbeat.watched
        return {
            "rank": dead,
            "phase": self._heartbeat.watched_phase,
            "exit_code": EXIT_FAILED,
            "message": f"rank {dead} died in {self._heartbeat.watched_phase}: {death}",
            "traceback": "",
            "shown_by": 0 if dead != 0 else self.rank,
        }

    def _wait_for_word_of_a_death(self) -> None:
        deadline = time.monotonic() + DEATH_WAIT_SECONDS
        while time.monotonic() < deadline and not self._store.check([_KEY]):
            time.sleep(POLL_SECONDS)

    def _leave_without_store(self) -> NoReturn:
        """The store lives in the launcher or in rank 0: it is gone, and so is the job."""
        with self._leaving:
            if self._heartbeat.watched == 0:  # this rank knows most of rank 0
                phase = self._heartbeat.watched_phase
                if self._heartbeat.process_is_gone():
                    text = f"rank 0 died in {phase}: its process is gone, and the job's store"
                else:
                    text = f"the job's store is gone, with rank 0 (last seen in {phase}) or the"
                    text += " launcher that held it"
                print(f"error: {text}", file=sys.stderr)
            else:
                logging.getLogger(__name__).error("the job's store is gone; leaving")
                time.sleep(DEATH_WAIT_SECONDS)  # a launcher kills all ranks when one leaves
            _leave(EXIT_FAILED)

    def _leave_with(self, failure: dict) -> NoReturn:
        with self._leaving:  # the main thread and the watch may both arrive
            if self.rank == failure["shown_by"]:
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
            logging.getLogger(__name__).error("the failure was not shown in time")


def _comes_from_a_peer(error: BaseException) -> bool:
    """Whether it may be what a collective says when a peer's process ends."""
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
    )


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
