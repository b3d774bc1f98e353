"""PyTorch's profiler over single steps, and named ranges for phases; all hangs on the ledger."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rlhf_megatron.observability.config import ProfileConfig
from rlhf_megatron.observability.ledger import PhaseLedger, PhaseRecord

PROFILE_FOLDER = "profile"

logger = logging.getLogger(__name__)


def watch_phases(
    ledger: PhaseLedger, *, config: ProfileConfig, output_dir: Path, device: torch.device
) -> None:
    """Hang ranges and profiler on the ledger, before other listeners, whose work they cover.

    On a GPU each phase is an NVTX range in every step, for tools that attach from outside (nsys).
    """
    if ledger.rank in config.ranks and config.steps:
        profiler = StepProfiler(
            config.steps, folder=output_dir / PROFILE_FOLDER, rank=ledger.rank, device=device
        )
        ledger.step_listeners.append(profiler)
        ledger.listeners.append(profiler)
    if device.type == "cuda":
        ledger.listeners.append(NvtxRanges())


class StepProfiler:
    """Writes FOLDER/step_N_rank_M.json.gz of each of `steps`, with a range for each phase.

    A profiler that cannot start or write says so in the log, and the run goes on without.
    """

    def __init__(self, steps: list[int], *, folder: Path, rank: int, device: torch.device) -> None:
        self._steps, self._folder, self._rank, self._device = steps, folder, rank, device
        self._profile: Any = None
        self._range: Any = None

    def step_started(self, step: int) -> None:
        """Of a step that was given up nothing is written."""
        self._leave_range()
        self._stop()
        if step in self._steps:
            self._attempt("start", self._start)

    def step_finished(self, step: int) -> None:
        self._leave_range()
        running = self._stop()
        if running is not None:
            self._attempt("write its trace", lambda: self._write(running, step=step))

    def phase_entered(self, *, step: int, phase: str) -> None:
        self._leave_range()
        if self._profile is not None:
            self._range = record_function(phase)
            self._range.__enter__()

    def phase_exited(self, record: PhaseRecord) -> None:
        self._leave_range()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        started = profile(activities=activities)
        started.start()
        self._profile = started

    def _stop(self) -> Any:
        """The profiler that was running, or None."""
        running, self._profile = self._profile, None
        if running is not None and self._attempt("stop", running.stop):
            return running
        return None

    def _write(self, running: Any, *, step: int) -> None:
        begin = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{step:06d}_rank_{self._rank:04d}.json.gz"
        partial = path.with_name(f"partial_{path.name}")
        running.export_chrome_trace(str(partial))
        partial.replace(path)
        size_mb, seconds = path.stat().st_size / 1e6, time.monotonic() - begin
        logger.info("profile of step %d: %s, %.1f MB in %.1f s", step, path, size_mb, seconds)

    def _leave_range(self) -> None:
        """Also of a phase that an exception ended."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _attempt(self, what: str, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:  # a missing CUPTI, a full disk: no reason to lose a run
            logger.warning("profile.steps: the profiler could not %s: %s", what, error)
            return False
        return True


class NvtxRanges:
    """A PhaseListener: each phase as a range in NVIDIA's tools."""

    def __init__(self) -> None:
        self._range: int | None = None

    def phase_entered(self, *, step: int, phase: str) -> None:
        self._end()
        self._range = torch.cuda.nvtx.range_start(phase)

    def phase_exited(self, record: PhaseRecord) -> None:
        self._end()

    def _end(self) -> None:
        """Also of a phase that an exception ended."""
        if self._range is not None:
            torch.cuda.nvtx.range_end(self._range)
            self._range = None
