"""Stopping on purpose: by SIGTERM, SIGUSR1 or before the job's time limit, on all ranks at once.

The first signal asks the run to stop at the next place where it can; a second one ends the process
at once. A signal to one rank stops all: they agree where phases end.
"""

import logging
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from rlhf_megatron.errors import EXIT_FAILED
from rlhf_megatron.observability.ledger import PhaseRecord

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
SAME_SIGNAL_SECONDS = 2.0
"""A launcher and the scheduler may both pass one signal on: repeats within so long are the same."""

_UPDATES = ("update_critic", "update_actor")


class RunStopped(Exception):  # noqa: N818 - no error
    """The run has stopped on purpose and can be resumed; not an error. `args[0]` says what for."""


class StepAbandoned(Exception):  # noqa: N818 - no error
    """The step is given up, before it has changed any weight, because the run is to stop."""


class StopSignals:
    """Receives the signals of one process. Made on the main thread, once."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        # Python's own handlers wait for the main thread, which may be deep in a collective or in a
        # rollout: the numbers come through a pipe to a thread that is always there.
        self._former_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, _nothing) for number in SIGNALS}
        threading.Thread(
            target=self._watch, args=(reader,), name="stop-signals", daemon=True
        ).start()

    def hold(self) -> None:
        """Take the signals back from a library that has set a handler of its own, or, below
        Python, the default one: the process would end without saving. On the main thread."""
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in SIGNALS:
            found = signal.signal(number, _nothing)
            if found is not _nothing:
                name = signal.Signals(number).name
                logger.warning("%s had been taken over by %r; taken back", name, found)

    @property
    def reason(self) -> str:
        """The signal that asked for the stop; "" where none did."""
        return signal.Signals(self._first[0]).name if self._first is not None else ""

    def close(self) -> None:
        """Put the former handlers back."""
        signal.set_wakeup_fd(self._former_descriptor)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        os.close(self._writer)

    def _watch(self, reader: int) -> None:
        while numbers := os.read(reader, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._received(number)
        os.close(reader)

    def _received(self, number: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (number, now)
            logger.warning("%s: the run will stop and save", signal.Signals(number).name)
        elif now - self._first[1] > SAME_SIGNAL_SECONDS:
            _leave_at_once(number)


def _nothing(*_: object) -> None:
    """A handler, so that the signal does not end the process."""


def _leave_at_once(number: int) -> NoReturn:
    logger.error("a second signal, %s: leaving at once", signal.Signals(number).name)
    logging.shutdown()
    os._exit(EXIT_FAILED)


@dataclass(frozen=True)
class TimeLimit:
    """When the scheduler will end the job, and how long before that the run stops."""

    end: float
    """Seconds since 1970."""
    stop_before_seconds: float

    @property
    def reason(self) -> str:
        """ "" until it is time to stop."""
        left = self.end - time.time()
        if left > self.stop_before_seconds:
            return ""
        return f"the job's time limit, {max(left, 0) / 60:.1f} minutes away"


def slurm_time_limit(*, stop_before_minutes: float) -> TimeLimit | None:
    """The limit of this Slurm job; None where there is no job, no limit, or nothing to stop for."""
    if stop_before_minutes == 0 or "SLURM_JOB_ID" not in os.environ:
        return None
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    seconds = float(end) if end.isdigit() else _end_from_scontrol(os.environ["SLURM_JOB_ID"])
    if seconds is None:
        logger.warning(
            "checkpoint.stop_before_minutes: neither SLURM_JOB_END_TIME nor scontrol tells when "
            "job %s ends; it will not be stopped beforehand",
            os.environ["SLURM_JOB_ID"],
        )
        return None
    return TimeLimit(seconds, stop_before_minutes * 60)


def _end_from_scontrol(job: str) -> float | None:
    if shutil.which("scontrol") is None:
        return None
    try:
        text = subprocess.run(
            ["scontrol", "show", "job", job],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
        found = re.search(r"EndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
        if found is None:  # "Unknown": no limit
            return None
        return time.mktime(time.strptime(found.group(1), "%Y-%m-%dT%H:%M:%S"))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


class StopAgreement:
    """Decides, on all ranks alike, whether the run stops. A joint PhaseListener: until the first
    update of a step, the end of each phase that all ranks enter is a place to stop, and raises
    StepAbandoned on all ranks."""

    def __init__(
        self,
        *,
        signals: StopSignals | None,
        time_limit: TimeLimit | None,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._signals, self._time_limit = signals, time_limit
        self._group, self._device = group, device
        self._may_abandon = False
        self.reason = ""
        """Why the run stops; "" while it goes on. On a rank that was not told: "another rank"."""

    def step_begins(self) -> None:
        """From here to its first update the step may be abandoned. On the main thread."""
        if self._signals is not None:
            self._signals.hold()
        self._may_abandon = True

    def updates_begin(self) -> None:
        """From here on the step is seen through. On all ranks, whether or not they update."""
        self._may_abandon = False

    def step_ends(self) -> None:
        self._may_abandon = False

    def step_abandoned(self, why: str) -> None:
        """The step was given up; the run stops, for `why` where nobody had asked for it."""
        self._may_abandon = False
        self.reason = self.reason or why

    def phase_entered(self, *, step: int, phase: str) -> None:
        if phase in _UPDATES:
            self._may_abandon = False

    def phase_exited(self, record: PhaseRecord) -> None:
        if self._may_abandon and self.agreed():
            self._may_abandon = False
            raise StepAbandoned(self.reason)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. Collective over the job."""
        return self.agree([])[0]

    def agree(self, further: list[bool]) -> list[bool]:
        """Whether any rank was asked to stop, then for each of `further` whether it holds on any
        rank. Collective over the job, in one small all-reduce."""
        own = self._own_reason()
        flags = torch.tensor(
            [bool(own or self.reason), *further], dtype=torch.int32, device=self._device
        )
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        answers = [bool(flag) for flag in flags.tolist()]
        if answers[0] and not self.reason:
            self.reason = own or "another rank"
        return answers

    def _own_reason(self) -> str:
        asked = self._signals.reason if self._signals is not None else ""
        limit = self._time_limit.reason if self._time_limit is not None else ""
        return asked or limit
