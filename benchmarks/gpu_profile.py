"""Where the time of a piece of work goes: kernels by kind, idle time of the GPU, host syncs."""

import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_machine import seconds_of
from torch.profiler import ProfilerActivity, profile

KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # The first row with a word that the kernel's name contains, in lower case.
    ("optimizer", ("adam", "multi_tensor", "multitensor", "l2norm", "foreach")),
    ("attention", ("flash", "fmha", "attention", "softmax_rescale", "sdpa", "cudnn_generated")),
    ("gemm", ("gemm", "nvjet", "cutlass", "cublas", "xmma", "aten::mm", "addmm", "bmm", "matmul")),
    ("copy", ("memcpy", "memset", "copy", "fill", "catarray", "aten::cat", "aten::to")),
    ("index", ("index", "gather", "scatter", "embedding", "sort", "radix")),
    ("norm", ("norm",)),
    ("elementwise", ("elementwise_kernel", "pointwise", "triton_poi")),
    ("communication", ("nccl", "c10d", "gloo")),
    ("reduction", ("reduce", "triton_red", "triton_per", "softmax", "scan", "sum", "max")),
    ("elementwise", ("triton", "aten::", "fused", "rope", "swiglu")),
)
SYNC_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def kind_of(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, words in KINDS if any(w in lower for w in words)), "other")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """All calls of one kernel, or on a CPU of one operator without what it calls."""

    name: str
    seconds: float
    count: int


@dataclass(kw_only=True)
class Profile:
    """Of one call of some work."""

    wall_seconds: float
    """With the profiler, which costs little where it watches the GPU alone."""
    busy_seconds: float
    """With at least one kernel or copy running; on a CPU the sum of the operators' own time."""
    kernels: list[Kernel]
    host_waits: dict[str, int] = field(default_factory=dict)
    """Calls of CUDA's runtime that wait for the device; two or three are the measurement's own."""

    @property
    def num_kernels(self) -> int:
        return sum(kernel.count for kernel in self.kernels)

    def by_kind(self) -> dict[str, Kernel]:
        """Kind -> all its kernels together, the longest first."""
        seconds: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for kernel in self.kernels:
            seconds[kind_of(kernel.name)] += kernel.seconds  # type: ignore[assignment]
            counts[kind_of(kernel.name)] += kernel.count
        return {
            kind: Kernel(name=kind, seconds=value, count=counts[kind])
            for kind, value in seconds.most_common()
        }

    def table(self, *, top: int = 15) -> str:
        """For the screen."""
        lines = [
            f"wall {self.wall_seconds * 1e3:.1f} ms, busy {self.busy_seconds * 1e3:.1f} ms "
            f"({self.busy_seconds / self.wall_seconds:.1%}), {self.num_kernels} kernels; "
            f"waits for the device: {self.host_waits or 'none'}"
        ]
        total = sum(kernel.seconds for kernel in self.kernels) or 1.0
        longest = sorted(self.kernels, key=lambda kernel: -kernel.seconds)[:top]
        for title, rows in (("kind", self.by_kind().values()), ("kernel", longest)):
            lines.append(f"{title:<62}{'ms':>10}{'share':>8}{'calls':>8}{'us each':>10}")
            lines += [_row(kernel, total=total) for kernel in rows]
        return "\n".join(lines)

    def figures(self) -> dict[str, Any]:
        """For a file."""
        return {
            "wall_seconds": self.wall_seconds,
            "busy_seconds": self.busy_seconds,
            "num_kernels": self.num_kernels,
            "host_waits": self.host_waits,
            "kinds": {kind: kernel.seconds for kind, kernel in self.by_kind().items()},
            "kernels": [
                [kernel.name[:160], kernel.seconds, kernel.count]
                for kernel in sorted(self.kernels, key=lambda kernel: -kernel.seconds)[:60]
            ],
        }


def _row(kernel: Kernel, *, total: float) -> str:
    return (
        f"{kernel.name[:60]:<62}{kernel.seconds * 1e3:>10.2f}{kernel.seconds / total:>8.1%}"
        f"{kernel.count:>8}{kernel.seconds / kernel.count * 1e6:>10.1f}"
    )


def profiled(
    work: Callable[[], object], *, device: torch.device, trace_file: Path | None = None
) -> Profile:
    """Run `work` once under torch's profiler. `trace_file`: keep the trace there, for a viewer
    (.json.gz packs it), with the CPU's side, which slows the work down."""
    if trace_file is not None:
        both = [ProfilerActivity.CPU]
        both += [ProfilerActivity.CUDA] if device.type == "cuda" else []
        with profile(activities=both) as recorded:
            seconds_of(work, device=device)
        recorded.export_chrome_trace(str(trace_file))
    if device.type == "cuda":
        return _profiled_gpu(work, device=device)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        wall = seconds_of(work, device=device)
    kernels = [
        Kernel(name=row.key, seconds=row.self_cpu_time_total / 1e6, count=row.count)
        for row in recorded.key_averages()
    ]
    busy = sum(kernel.seconds for kernel in kernels)
    return Profile(wall_seconds=wall, busy_seconds=busy, kernels=kernels)


def _profiled_gpu(work: Callable[[], object], *, device: torch.device) -> Profile:
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        wall = seconds_of(work, device=device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return from_trace(events, wall_seconds=wall)


def from_trace(events: Iterable[Mapping[str, Any]], *, wall_seconds: float) -> Profile:
    """From the events of a trace in Chrome's format, whose times are in microseconds."""
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    intervals: list[tuple[float, float]] = []
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            seconds[name] += event["dur"] / 1e6
            counts[name] += 1
            intervals.append((event["ts"], event["ts"] + event["dur"]))
        elif category == "cuda_runtime" and name in SYNC_CALLS:
            waits[name] += 1
    return Profile(
        wall_seconds=wall_seconds,
        busy_seconds=covered(intervals) / 1e6,
        kernels=[Kernel(name=n, seconds=s, count=counts[n]) for n, s in seconds.items()],
        host_waits=dict(waits),
    )


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union: kernels of several streams may run at once."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def host_syncs(work: Callable[[], object], *, device: torch.device) -> dict[str, int]:
    """Where Python makes the host wait for the GPU, and how often: file:line -> times.

    What torch.cuda.set_sync_debug_mode sees: copies to the host, .item(), nonzero and the like; not
    torch.cuda.synchronize. Empty on a CPU.
    """
    if device.type != "cuda":
        return {}
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    places = [
        f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}"
        for warning in caught
        if "called a synchronizing" in str(warning.message)
    ]
    return dict(Counter(places).most_common())


def sync_table(places: dict[str, int]) -> str:
    """For the screen."""
    lines = [f"{sum(places.values())} host syncs"]
    return "\n".join(lines + [f"{count:>6}  {place}" for place, count in places.items()])
