"""The memory of a rank while the run goes on: a line every few steps, a summary on request."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from rlhf_megatron.observability.memory import allocator_summary, monitor_line
from rlhf_megatron.observability.tensors import Names, largest_tensors

logger = logging.getLogger(__name__)

REQUEST = "memory_summary"
"""File in the run folder: each time it is touched, every rank writes a summary into its log."""


class MemoryMonitor:
    """Of this rank. `say` prints on rank 0 and logs everywhere."""

    def __init__(
        self,
        *,
        device: torch.device,
        folder: Path,
        interval_steps: int,
        say: Callable[[str], None],
        names: Names = dict,
    ) -> None:
        """interval_steps: logging.monitor_interval_steps. names: tensors known by name."""
        self._device, self._request = device, folder / REQUEST
        self._interval_steps, self._say, self._names = interval_steps, say, names
        self._answered = self._requested_at()

    def summary(self, when: str) -> None:
        """Into the rank's log: the allocator's account, and the largest tensors."""
        lines = "\n".join(largest_tensors(self._device, names=self._names))
        logger.info(
            "memory %s:\n%s\nlargest tensors:\n%s", when, allocator_summary(self._device), lines
        )

    def after_step(self, step: int) -> None:
        """The line where it is due, and the summary where it was asked for."""
        if self._interval_steps and step % self._interval_steps == 0:
            self._say(monitor_line(self._device, step=step))
        requested = self._requested_at()
        if requested != self._answered:
            self._answered = requested
            self.summary(f"after step {step}, as {self._request} asks")

    def _requested_at(self) -> int | None:
        try:
            return self._request.stat().st_mtime_ns
        except OSError:
            return None
