"""Rewards in processes of their own: one that is stuck is killed, one that dies is replaced."""

import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import UserError
from rlhf_megatron.rewards.contract import (
    BackgroundScorer,
    NoScoreError,
    PendingScores,
    ScoringInput,
    one_line,
)
from rlhf_megatron.rewards.worker import WorkerSetup

START_SECONDS = 300.0
"""How long a worker may take to import the reward."""
POLL_SECONDS = 0.5
FIRST_WORDS_CHARACTERS, LAST_WORDS_CHARACTERS = 450, 150
"""Shown of what a worker printed before it ended: a crash prints its innermost frame first."""
_OF_THE_JOB = frozenset(
    {
        *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    }
)
_ROOT = Path(__file__).resolve().parents[2]


class WorkerPool(BackgroundScorer):
    """`workers` processes that call the reward function, one sample at a time each.

    A sample that takes longer than `timeout_seconds` (0: no limit), or whose worker dies, has
    NoScoreError in place of its score; the worker is killed, with whatever it has started, and
    replaced.
    What the function prints goes to `log_folder`/reward_NAME_NN.log, or without one to stderr.

    Raises UserError where a worker cannot load the function. Any thread may call `begin`, and
    again before the last samples are scored.
    """

    def __init__(
        self,
        function: str,
        *,
        workers: int,
        timeout_seconds: float = 0.0,
        fields: Sequence[str] | None = None,
        log_folder: Path | None = None,
        name: str = "worker",
    ) -> None:
        """`function`: as in reward.function. `fields`: names of the prompt rows' other fields,
        where they are known."""
        setup = WorkerSetup(
            function=function,
            fields=None if fields is None else tuple(fields),
            path=tuple(sys.path),
        )
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._attendants = [
            _Attendant(
                setup,
                tasks=self._tasks,
                timeout_seconds=timeout_seconds,
                log=None if log_folder is None else log_folder / f"reward_{name}_{i:02d}.log",
            )
            for i in range(workers)
        ]
        for attendant in self._attendants:
            attendant.start()
        problems = [attendant.wait_until_begun() for attendant in self._attendants]
        refused = next((problem for problem in problems if problem), "")
        if refused:
            self.close()
            raise UserError(refused)

    def begin(self) -> PendingScores:
        return _PoolScores(self._tasks)

    def take_counts(self) -> dict[str, float]:
        return {"reward/workers_replaced": float(sum(a.take_count() for a in self._attendants))}

    @property
    def pids(self) -> list[int]:
        """Of the workers that run."""
        return [a.worker.pid for a in self._attendants if a.worker is not None and a.is_alive()]

    def close(self) -> None:
        """End all workers; samples that are being scored fail."""
        for _ in self._attendants:
            self._tasks.put(None)
        for attendant in self._attendants:
            attendant.end()
        for attendant in self._attendants:
            attendant.join()


class _PoolScores(PendingScores):
    """Filled by the attendants, each outcome once."""

    def __init__(self, tasks: "queue.SimpleQueue[_Task | None]") -> None:
        self._tasks = tasks
        self._outcomes: list[Any] = []
        self._num_scored, self._is_complete = 0, False
        self._changed = threading.Condition()
        self.is_cancelled = False

    def add(self, sample: ScoringInput) -> None:
        assert not self._is_complete, "add() after all_added()"
        with self._changed:
            index = len(self._outcomes)
            self._outcomes.append(None)
        self._tasks.put(_Task(self, index, sample))

    def all_added(self) -> None:
        self._is_complete = True

    @property
    def num_scored(self) -> int:
        with self._changed:
            return self._num_scored

    def put(self, index: int, outcome: Any) -> None:
        with self._changed:
            self._outcomes[index] = outcome
            self._num_scored += 1
            self._changed.notify_all()

    def result(self) -> list[Any]:
        assert self._is_complete and not self.is_cancelled
        with self._changed:
            self._changed.wait_for(lambda: self._num_scored == len(self._outcomes))
        return self._outcomes

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass(frozen=True)
class _Task:
    pending: _PoolScores
    index: int
    sample: ScoringInput


class _Attendant(threading.Thread):
    """Looks after one worker: hands it a sample, waits for the score, replaces it. The worker ends
    with the thread that started it, so this one lives as long as the pool."""

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        tasks: "queue.SimpleQueue[_Task | None]",
        timeout_seconds: float,
        log: Path | None,
    ) -> None:
        super().__init__(name="reward worker's attendant", daemon=True)
        self._setup, self._tasks, self._log = setup, tasks, log
        self._timeout_seconds = timeout_seconds
        self._begun = threading.Event()
        self._problem = ""
        self._replaced, self._ends = 0, False
        self.worker: _Worker | None = None

    def run(self) -> None:
        try:
            self._start_worker()
        except (UserError, NoScoreError, OSError) as error:
            self._problem = str(error)
        self._begun.set()
        while (task := self._tasks.get()) is not None and not self._ends:
            if task.pending.is_cancelled:
                continue
            try:
                outcome = self._score(task.sample)
            except Exception as error:  # a sample that cannot be sent, no process to be had
                outcome = error
            task.pending.put(task.index, outcome)
        self.end()

    def wait_until_begun(self) -> str:
        """The problem that the first worker met, "" for none."""
        self._begun.wait()
        return self._problem

    def take_count(self) -> int:
        count, self._replaced = self._replaced, 0
        return count

    def end(self) -> None:
        """Kill the worker; from any thread."""
        self._ends = True
        if self.worker is not None:
            self.worker.kill()

    def _start_worker(self) -> "_Worker":
        self.worker = worker = _Worker(self._setup, log=self._log)
        try:
            answer = worker.answer(START_SECONDS)
            reason = f"did not load it within {START_SECONDS:g} s"
        except (EOFError, ConnectionError):
            answer, reason = None, f"{worker.how_it_ended()} while it loaded it"
        if answer is None:
            reason += worker.last_words()
            self._drop_worker()
            raise NoScoreError(f"reward.function={self._setup.function!r}: its worker {reason}")
        if "refused" in answer:
            self._drop_worker()
            raise UserError(answer["refused"])
        return worker

    def _score(self, sample: ScoringInput) -> Any:
        worker = self.worker or self._start_worker()
        limit = self._timeout_seconds
        try:
            worker.send(sample)
            answer = worker.answer(limit)
            reason = f"took longer than reward.timeout_seconds={limit:g}, its worker was killed"
        except (EOFError, ConnectionError):
            answer, reason = None, f"its worker {worker.how_it_ended()}"
        if answer is None:
            reason += worker.last_words()
            self._drop_worker()
            return NoScoreError(reason)
        return answer["score"] if "score" in answer else NoScoreError(answer["reason"])

    def _drop_worker(self) -> None:
        assert self.worker is not None
        self.worker.kill()
        self.worker = None
        self._replaced += not self._ends


class _Worker:
    """One process, and this end of its socket."""

    def __init__(self, setup: WorkerSetup, *, log: Path | None) -> None:
        self._log = log
        self._connection, theirs = Pipe()
        output = None if log is None else log.open("ab")
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-u", "-m", "rlhf_megatron.rewards.worker"),
                    *(str(theirs.fileno()), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # killed with all that it has started
            )
        finally:
            theirs.close()
            if output is not None:
                output.close()
        self.pid = self._process.pid
        self._log_begins = self._log_size()
        self._connection.send_bytes(pickle.dumps(setup))

    def send(self, sample: ScoringInput) -> None:
        self._log_begins = self._log_size()
        self._connection.send_bytes(pickle.dumps(sample))

    def answer(self, limit_seconds: float) -> dict[str, Any] | None:
        """None where it takes longer (0: no limit). Time in which this process stood still does not
        count. Raises EOFError or ConnectionError where the worker is gone."""
        waited = 0.0
        while limit_seconds == 0 or waited < limit_seconds:
            step = POLL_SECONDS if limit_seconds == 0 else limit_seconds - waited
            step = min(step, POLL_SECONDS)
            if self._connection.poll(step):
                return dict(json.loads(self._connection.recv_bytes()))
            waited += step
        return None

    def how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code >= 0:
            return f"left with exit code {code}"
        return f"died of {signal.Signals(-code).name}"

    def last_words(self) -> str:
        """What it printed since it got the sample, for the end of a message."""
        if self._log is None:
            return ""
        with self._log.open("rb") as file:
            file.seek(self._log_begins)
            text = one_line(file.read().decode(errors="replace"))
        if not text:
            return ""
        if len(text) > FIRST_WORDS_CHARACTERS + LAST_WORDS_CHARACTERS:
            text = f"{text[:FIRST_WORDS_CHARACTERS]} ... {text[-LAST_WORDS_CHARACTERS:]}"
        return f"; it printed: {text} ({self._log})"

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _log_size(self) -> int:
        return self._log.stat().st_size if self._log is not None else 0


def _environment() -> dict[str, str]:
    """Of a worker: not one of the job's ranks, without a GPU, one thread, this very package."""
    found = {name: value for name, value in os.environ.items() if name not in _OF_THE_JOB}
    path = [str(_ROOT), *filter(None, [found.get("PYTHONPATH", "")])]
    return {
        **found,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }
