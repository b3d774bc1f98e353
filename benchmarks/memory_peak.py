"""The most memory that a process holds while something runs, for the benchmarks."""

import os
import threading
from pathlib import Path

import torch

SAMPLE_SECONDS = 0.01


class MemoryPeak:
    """Watches from its making to `stop`. On a GPU what torch has allocated on it; on a CPU the
    anonymous memory of this process and its children together, sampled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before_bytes = torch.cuda.memory_allocated(device)
            return
        self.before_bytes = self._most_bytes = _anonymous_bytes(os.getpid())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """The most bytes held at once, those held before among them."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        self._stop.set()
        self._thread.join()
        return self._most_bytes

    def _watch(self) -> None:
        last = self.before_bytes
        while not self._stop.wait(SAMPLE_SECONDS):
            now = _anonymous_bytes(os.getpid())
            # A fork between reading a process and its new child counts their pages twice, once.
            self._most_bytes = max(self._most_bytes, min(now, last))
            last = now


def _anonymous_bytes(pid: int) -> int:
    """Pss_Anon counts a page that forked processes share once in all."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    own = [line.split()[1] for line in text.splitlines() if line.startswith("Pss_Anon:")]
    return 1024 * int(own[0]) + sum(_anonymous_bytes(child) for child in children)
