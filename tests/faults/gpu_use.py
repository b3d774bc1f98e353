"""What is on this machine's GPUs: processes and memory, before and after a job."""

import subprocess
import time
from dataclasses import dataclass

SMALLEST_CONTEXT_MB = 100
"""A process on a GPU takes more than this of its memory."""
SECONDS_TO_CLEAN_UP = 5.0


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """What nvidia-smi says of all GPUs."""

    processes: frozenset[int]
    memory_mb: tuple[int, ...]
    """Used, of each GPU. Tells of a process even where its number is another one in here."""

    def left_since(self, before: "GpuUse") -> list[str]:
        """What is there that was not there before."""
        found = [f"process {pid} is left" for pid in sorted(self.processes - before.processes)]
        for number, (old, new) in enumerate(zip(before.memory_mb, self.memory_mb, strict=True)):
            if new > old + SMALLEST_CONTEXT_MB:
                found.append(f"GPU {number}: {new - old} MB more in use")
        return found


def gpu_use() -> GpuUse:
    def ask(query: str) -> list[int]:
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return [int(line) for line in done.stdout.split() if line.isdigit()]

    return GpuUse(
        processes=frozenset(ask("--query-compute-apps=pid")),
        memory_mb=tuple(ask("--query-gpu=memory.used")),
    )


def left_on_gpus(before: GpuUse) -> list[str]:
    """The driver takes a moment to clean up after a process that is gone."""
    deadline = time.monotonic() + SECONDS_TO_CLEAN_UP
    while (found := gpu_use().left_since(before)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found
