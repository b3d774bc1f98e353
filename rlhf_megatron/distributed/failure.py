"""Error agreement: any rank's exception ends the job on all ranks, with that rank's message.

A rank that fails writes its error to the job's key-value store; the first one wins. A thread on
every rank watches the key, because a rank that waits in a collective cannot be woken otherwise.
Rank 0 prints the message, once, and every rank leaves with the exit code that belongs to it. For a
rank that was killed its neighbour writes the error (heartbeat.py). Where a rank stays in one place
beyond its limit, all ranks first say what they are doing (watchdog.py). While the threads of a rank
cannot run, a process beside it watches in their place (stand_in.py).
"""

import faulthandler
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import IO, Any, NoReturn

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from rlhf_megatron.distributed.heartbeat import (
    GRACE_SECONDS,
    Heartbeat,
    Position,
    Stay,
    process_state,
)
from rlhf_megatron.distributed.stand_in import STACKS_SIGNAL, StandIn
from rlhf_megatron.distributed.watchdog import (
    Alarm,
    RankReport,
    SilentRank,
    describe,
    main_thread_frames,
    report_of_this_rank,
    stacks_of_all_threads,
)
from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_FAILED, JobError, UserError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
ACKNOWLEDGE_SECONDS = 10.0
SILENT_SECONDS = 600.0
"""Without a sign of life for so long, a rank on another node counts as dead."""
DEATH_WAIT_SECONDS = 2.0
"""When a peer dies, collectives fail on the others: so long they wait for its neighbour's word."""

DYING_SECONDS = 5.0
"""A killed process may take so long to give back its memory, on a GPU and in the host."""
GATHER_SECONDS = 4.0
"""So long the ranks have to say what they are doing, once one is beyond its limit."""
STORE_SILENT_SECONDS = 5.0
"""A call to the job's store that takes longer says that the store's process stands still."""

_KEY = "failure"
SHOWN_KEY = "failure_shown"
_REPORT = "report"


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
        self.rank, self._world_size = rank, world_size
        self.current_phase = current_phase
        self.position: Callable[[], Position] = lambda: Position(self.current_phase())
        """Where this rank is, with its time limit. May be called from other threads."""
        self.hide: Callable[[str], str] = lambda text: text
        """Takes secrets out of what is shown."""
        self.clean_up: Callable[[], None] = lambda: None
        """What rank 0 does before it leaves after a failure, such as to remove unfinished files."""
        self._store, self._silent_seconds = self._connect(seconds=60.0), silent_seconds
        self._heartbeat = Heartbeat(
            self._store, rank=rank, world_size=world_size, silent_seconds=silent_seconds
        )
        self._closing = threading.Event()
        self._leaving = threading.Lock()
        self._store_deadline: float | None = None
        """Until then the store has to answer the call that the watch has in flight."""
        self._error: BaseException | None = None
        self._stand_in: StandIn | None = None
        self._writes_stacks = False

    def _connect(self, *, seconds: float) -> PrefixStore:
        # A connection of its own: the default store's is busy while the main thread rendezvouses.
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        # torchrun keeps its store through restarts: what failed the last time is in it still.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"rlhf_megatron/attempt_{attempt}", store)

    def start(self) -> None:
        self._start_stand_in()
        for name, target in (("failure-watch", self._watch), ("store-guard", self._guard)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def close(self) -> None:
        """Stop watching; called when the job is over on all ranks."""
        self._closing.set()
        if self._stand_in is not None:
            self._stand_in.close()

    def write_stacks_into(self, file: IO[str]) -> None:
        """Where the stacks of this rank's threads go when it is ended while it is held up. The
        file must stay open."""
        faulthandler.register(STACKS_SIGNAL, file=file)
        self._writes_stacks = True

    def _start_stand_in(self) -> None:
        try:
            self._stand_in = StandIn(
                rank=self.rank, world_size=self._world_size, silent_seconds=self._silent_seconds
            )
        except OSError as error:
            logger.warning(
                "no process could be started that watches where this one cannot: %s", error
            )

    def _tell_stand_in(self) -> None:
        if self._stand_in is not None:
            watched = self._heartbeat.watched_sign
            self._stand_in.tell(
                own=asdict(self._heartbeat.sign(self.position())),
                seconds=self._heartbeat.own_stay.seconds,
                watched=asdict(watched) if watched is not None else None,
                writes_stacks=self._writes_stacks,
            )

    def report(self, error: BaseException) -> NoReturn:
        """Publish this rank's error (unless another was first) and leave the process."""
        self._error = error
        failure = self._failure(error)
        try:
            if _comes_from_a_peer(error):
                self._wait_for_word_of_a_death()
            first = self._publish(failure)
        except Exception:  # the store's host is gone: say it here, where it can still be said
            if _comes_from_a_peer(error):
                self._leave_without_store()
            _show(failure)
            self._leave(int(failure["exit_code"]))  # type: ignore[call-overload]
        self._leave_with(first)

    def _failure(self, error: BaseException) -> dict[str, Any]:
        position = self.position()
        if _is_timeout(error):
            stay = self._heartbeat.own_stay
            return self._alarm(self.rank, position=position, stay=stay, by_timeout=str(error))
        plain = isinstance(error, UserError | JobError)
        silent = plain or isinstance(error, KeyboardInterrupt)
        message = str(error) if plain else f"{type(error).__name__}: {error}".rstrip(": ")
        return {
            "rank": self.rank,
            "phase": position.phase,
            "exit_code": EXIT_BAD_INPUT if isinstance(error, UserError) else EXIT_FAILED,
            "message": self.hide(message),
            "traceback": "" if silent else self.hide("".join(traceback.format_exception(error))),
            "shown_by": 0,
        }

    def _alarm(
        self, rank: int, *, position: Position, stay: Stay, by_timeout: str = ""
    ) -> dict[str, Any]:
        """The failure that makes all ranks say what they are doing."""
        alarm = Alarm(
            rank=rank,
            phase=position.phase,
            seconds=stay.seconds,
            limit_seconds=position.limit_seconds,
            limit_key=position.limit_key,
            by_timeout=by_timeout,
        )
        return {
            "rank": rank,
            "phase": position.phase,
            "exit_code": EXIT_FAILED,
            "message": f"rank {rank} hangs in {position.phase}: {alarm.limit}",
            "traceback": "",
            "shown_by": 0,
            "alarm": asdict(alarm),
        }

    def _publish(self, failure: dict) -> dict:
        """Write the failure, unless there is one; returns the one that stands."""
        self._store.compare_set(_KEY, "", json.dumps(failure))
        return dict(json.loads(self._store.get(_KEY)))

    def _watch(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            try:
                self._tell_stand_in()
                self._store_deadline = time.monotonic() + STORE_SILENT_SECONDS
                failure = self._look()
                self._store_deadline = None
                if failure is not None and not self._closing.is_set():
                    self._leave_with(failure)
            except Exception:
                if self._closing.is_set():
                    return
                self._leave_without_store()

    def _look(self) -> dict | None:
        """The failure that ends the job, which this rank may be the first to see."""
        if self._store.check([_KEY]):
            return dict(json.loads(self._store.get(_KEY)))
        beats = self._heartbeat
        beats.beat(self.position())
        death = beats.death()
        if self._closing.is_set():
            return None
        if death:
            return self._publish(self._obituary(death))
        own, watched = beats.own_stay, beats.watched_stay
        if own.is_overdue():
            return self._publish(self._alarm(self.rank, position=own.position, stay=own))
        if watched.is_overdue(grace_seconds=GRACE_SECONDS):
            position = watched.position
            return self._publish(self._alarm(beats.watched, position=position, stay=watched))
        return None

    def _guard(self) -> None:
        """The store may live in rank 0, and stand still with it: then no call to it returns, and
        this rank has to judge by what it knows."""
        beats = self._heartbeat
        while not self._closing.wait(1.0):
            self._tell_stand_in()
            deadline = self._store_deadline
            if deadline is None or time.monotonic() < deadline:
                continue
            beats.own_stay.see(self.position())
            beats.watched_stay.tick()
            if beats.own_stay.is_overdue() or beats.watched_stay.is_overdue():
                self._leave_standing_store()

    def _leave_standing_store(self) -> NoReturn:
        logger.info("the job's store does not answer; stacks:\n%s", stacks_of_all_threads())
        if self._heartbeat.watched != 0:  # this rank knows least of rank 0
            time.sleep(DEATH_WAIT_SECONDS)
            self._leave(EXIT_FAILED)
        stay = self._heartbeat.own_stay
        alarm = Alarm(
            rank=self.rank,
            phase=stay.position.phase,
            seconds=stay.seconds,
            limit_seconds=stay.position.limit_seconds,
            limit_key=stay.position.limit_key,
        )
        host = SilentRank(
            rank=0,
            phase=self._heartbeat.watched_phase,
            number=0,
            process=f"{self._heartbeat.process_state()}, and the job's store in it",
        )
        message = describe(alarm, reports=self._own_reports(), silent=[host])
        print(f"error: {message}", file=sys.stderr, flush=True)
        self._heartbeat.end_watched_process()
        self._leave(EXIT_FAILED)

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
                if self._is_gone_within(DYING_SECONDS):
                    text = f"rank 0 died in {phase}: its process is gone, and the job's store"
                else:
                    text = f"the job's store is gone, with rank 0 (last seen in {phase}) or the"
                    text += " launcher that held it"
                print(f"error: {text}", file=sys.stderr)
            else:
                logger.error("the job's store is gone; leaving")
                time.sleep(DEATH_WAIT_SECONDS)  # a launcher kills all ranks when one leaves
            self._leave(EXIT_FAILED)

    def _is_gone_within(self, seconds: float) -> bool:
        """Whether the watched process ends: its connections do so first."""
        deadline = time.monotonic() + seconds
        while not self._heartbeat.process_is_gone():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def _leave_with(self, failure: dict) -> NoReturn:
        with self._leaving:  # the main thread and the watch may both arrive
            if "alarm" in failure:
                self._leave_after_alarm(Alarm(**failure["alarm"]))
            if self.rank == failure["shown_by"]:
                _show(failure)
                self._clean_up()
                self._store.set(SHOWN_KEY, "1")
                time.sleep(5 * POLL_SECONDS)  # rank 0 may host the store: let the others read it
            else:
                self._wait_until_shown()
            self._leave(int(failure["exit_code"]))

    def _leave_after_alarm(self, alarm: Alarm) -> NoReturn:
        """Say what this rank is doing; one rank puts together what all say."""
        logger.info(  # into the rank's log, not onto the screen
            "rank %d is beyond its limit in %s; stacks here:\n%s",
            alarm.rank,
            alarm.phase,
            stacks_of_all_threads(),
        )
        try:
            for report in self._own_reports():
                self._store.set(f"{_REPORT}/{self.rank}", json.dumps(asdict(report)))
            if self.rank == 0:
                self._describe_and_show(alarm)
            elif not self._is_shown_within(GATHER_SECONDS + 2.0):
                if self.rank == self._world_size - 1:  # rank 0 is the one that does not answer
                    self._describe_and_show(alarm)
                else:
                    self._is_shown_within(GATHER_SECONDS + 2.0)
            if not self._store.check([f"{_REPORT}/{self._heartbeat.watched}"]):
                self._heartbeat.end_watched_process()
            if self.rank == 0:
                time.sleep(5 * POLL_SECONDS)  # it may host the store: let the others read it
        except Exception as error:
            logger.error("the job's store is gone: %s", error)
        self._leave(EXIT_FAILED)

    def _describe_and_show(self, alarm: Alarm) -> None:
        reports = self._gather_reports()
        silent = [self._silent_rank(r) for r in range(self._world_size) if r not in reports]
        message = describe(alarm, reports=reports.values(), silent=silent)
        print(f"error: {message}", file=sys.stderr, flush=True)
        logger.info("%s", message)
        self._clean_up()
        self._store.set(SHOWN_KEY, "1")

    def _gather_reports(self) -> dict[int, RankReport]:
        keys = [f"{_REPORT}/{rank}" for rank in range(self._world_size)]
        deadline = time.monotonic() + GATHER_SECONDS
        while time.monotonic() < deadline and not self._store.check(keys):
            time.sleep(POLL_SECONDS)
        return {
            rank: RankReport(**json.loads(self._store.get(key)))
            for rank, key in enumerate(keys)
            if self._store.check([key])
        }

    def _silent_rank(self, rank: int) -> SilentRank:
        sign = self._heartbeat.last_sign(rank)
        if sign is None:
            return SilentRank(rank=rank, phase="start", number=0, process="has never given a sign")
        near = self._heartbeat.sees(sign)
        process = process_state(sign) if near else "is on another node"
        return SilentRank(rank=rank, phase=sign.phase, number=sign.number, process=process)

    def _own_reports(self) -> list[RankReport]:
        """One, where it can be told what this rank does."""
        error, position = self._error, self.position()
        report = report_of_this_rank(
            self.rank,
            position=position,
            seconds=self._heartbeat.own_stay.seconds,
            frames=(
                main_thread_frames()
                if error is None
                else list(traceback.extract_tb(error.__traceback__))
            ),
        )
        return [report]

    def _is_shown_within(self, seconds: float) -> bool:
        try:
            self._store.wait([SHOWN_KEY], timedelta(seconds=seconds))
        except Exception:
            return False
        return True

    def _clean_up(self) -> None:
        try:
            self.clean_up()
        except Exception as error:
            logger.error("could not clean up: %s", error)

    def _wait_until_shown(self) -> None:
        """A launcher kills all ranks when one leaves: rank 0 has to print first."""
        try:
            self._store.wait([SHOWN_KEY], timedelta(seconds=ACKNOWLEDGE_SECONDS))
        except Exception:
            logger.error("the failure was not shown in time")

    def _leave(self, exit_code: int) -> NoReturn:
        for child in multiprocessing.active_children():  # os._exit would leave them behind
            child.kill()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def _comes_from_a_peer(error: BaseException) -> bool:
    """Whether it may be what a collective says when a peer's process ends."""
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
    )


def _is_timeout(error: BaseException) -> bool:
    """Whether a collective has given up waiting: then another rank is the cause."""
    text = str(error).lower()
    return _comes_from_a_peer(error) and ("timed out" in text or "timeout" in text)


def _show(failure: dict) -> None:
    if failure["traceback"]:
        print(
            f"error: rank {failure['rank']} failed in {failure['phase']}: "
            f"{failure['message']}\n{failure['traceback']}",
            file=sys.stderr,
        )
    else:
        print(f"error: {failure['message']}", file=sys.stderr)
