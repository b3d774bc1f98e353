"""Memory of this process: what it holds, the most it held, and what the allocator says of itself.

All _gb are 10^9 bytes. On a GPU the figures are those of PyTorch's caching allocator (tensors, what
it holds from the driver, what is not free yet) and the driver's for the whole device. On a CPU they
are the resident set.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

GB = 1e9

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""proc(5), clear_refs: sets VmHWM, the peak of the resident set, to its present size."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """As of now; the peak since the last `reset_peak`. On a CPU allocated, reserved and active are
    all the resident set."""

    allocated_gb: float
    """Tensors."""
    reserved_gb: float
    """What the allocator holds from the driver, its cache included."""
    active_gb: float
    """Tensors, and freed ones that another stream still uses."""
    peak_gb: float
    """Most of allocated."""
    alloc_retries: int = 0
    """Since the start: how often the allocator had to give its cache back to find room."""
    device_used_gb: float = 0.0
    """By all processes and libraries on this GPU; 0 on a CPU."""

    def without(self, gb: float) -> "MemoryUse":
        """Less what the allocator counts that is not on the device; the peak too."""
        return replace(
            self,
            allocated_gb=self.allocated_gb - gb,
            reserved_gb=self.reserved_gb - gb,
            active_gb=self.active_gb - gb,
            peak_gb=self.peak_gb - gb,
        )

    @property
    def fragmentation(self) -> float:
        """Reserved but not allocated, as a share of reserved."""
        return max(0.0, 1.0 - self.allocated_gb / self.reserved_gb) if self.reserved_gb else 0.0


def memory_use(device: torch.device) -> MemoryUse:
    """Memory of this process on `device`."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        return MemoryUse(
            allocated_gb=stats.get("allocated_bytes.all.current", 0) / GB,
            reserved_gb=stats.get("reserved_bytes.all.current", 0) / GB,
            active_gb=stats.get("active_bytes.all.current", 0) / GB,
            peak_gb=stats.get("allocated_bytes.all.peak", 0) / GB,
            alloc_retries=stats.get("num_alloc_retries", 0),
            device_used_gb=(total - free) / GB,
        )
    resident, peak = _resident_bytes()
    return MemoryUse(
        allocated_gb=resident / GB,
        reserved_gb=resident / GB,
        active_gb=resident / GB,
        peak_gb=max(peak, resident) / GB,
    )


def reset_peak(device: torch.device) -> bool:
    """From here on the peak counts anew. False where it does not: on a CPU whose kernel has no such
    mark (other than Linux) or does not let it be reset (some sandboxes)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


class PeakMemory:
    """The most that is allocated beyond what there was when this was made.

    Raises RuntimeError where the peak cannot be reset.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if not reset_peak(device):
            raise RuntimeError(f"{_CLEAR_REFS}: cannot be written, so there is no peak to measure")
        self._before = memory_use(device)

    def extra_bytes(self) -> int:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return round((memory_use(self._device).peak_gb - self._before.allocated_gb) * GB)


def monitor_line(device: torch.device, *, step: int) -> str:
    """`[Step 100] GPU: cuda:0 | Allocated: 32.1GB | Reserved: 38.4GB | Active: 29.7GB`."""
    use = memory_use(device)
    if device.type == "cuda":
        return (
            f"[Step {step}] GPU: {device} | Allocated: {use.allocated_gb:.1f}GB | "
            f"Reserved: {use.reserved_gb:.1f}GB | Active: {use.active_gb:.1f}GB"
        )
    return f"[Step {step}] CPU: process memory | Resident: {use.allocated_gb:.3f}GB"


def allocator_summary(device: torch.device) -> str:
    """What PyTorch's allocator says of itself; on a CPU, which has none, the process's memory."""
    if device.type == "cuda":
        return str(torch.cuda.memory_summary(device))
    if not _STATUS.exists():
        return monitor_line(device, step=0)
    lines = _STATUS.read_text().splitlines()
    shown = [line for line in lines if line.startswith(("Vm", "Rss", "Threads"))]
    return "process memory (/proc/self/status):\n" + "\n".join(shown)


def _resident_bytes() -> tuple[int, int]:
    """The resident set, and its peak since the last reset or the start."""
    if not _STATUS.exists():
        resident = int(psutil.Process().memory_info().rss)
        return resident, resident
    found = dict(re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE))
    return 1024 * int(found["VmRSS"]), 1024 * int(found["VmHWM"])
