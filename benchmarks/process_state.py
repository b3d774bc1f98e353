"""What a library may change in a process that has others' work to do, and how fast the process is.

`snapshot` before and after, `changes` between: settings of torch and Python, threads, environment.
`host_probes` times small, fixed pieces of work, each bound by another part of the machine.
"""

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_machine import seconds_of

HIDDEN = ("TOKEN", "SECRET", "KEY", "PASSWORD")
"""Words in names of environment variables whose values are not shown."""


def snapshot() -> dict[str, str]:
    """Settings by name, as text."""
    found: dict[str, Any] = {
        "torch.get_num_threads": torch.get_num_threads(),
        "torch.get_num_interop_threads": torch.get_num_interop_threads(),
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.get_default_dtype": torch.get_default_dtype(),
        "torch.are_deterministic_algorithms_enabled": (
            torch.are_deterministic_algorithms_enabled()
        ),
        "torch.is_anomaly_enabled": torch.is_anomaly_enabled(),
        "cpu affinity": len(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "threads of Python": threading.active_count(),
        "threads of the process": _num_threads(),
        "gc.isenabled": gc.isenabled(),
        "gc.get_threshold": gc.get_threshold(),
        "gc.get_freeze_count": gc.get_freeze_count(),
        "gc tracked objects": len(gc.get_objects()),
        "gc.callbacks": len(gc.callbacks),
        "sys.getswitchinterval": sys.getswitchinterval(),
        "sys.gettrace, getprofile": (sys.gettrace(), sys.getprofile()),
        "modules imported": len(sys.modules),
    }
    found |= {f"backends.{name}": value for name, value in _backends().items()}
    if torch.cuda.is_available():
        found |= _cuda()
    for module in ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config"):
        found |= {f"{module}.{name}": value for name, value in _config(module).items()}
    for name, value in os.environ.items():
        found[f"environment {name}"] = "hidden" if any(w in name for w in HIDDEN) else value
    return {name: str(value) for name, value in found.items()}


def _num_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else -1


def _backends() -> dict[str, Any]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    asked: dict[str, Callable[[], Any]] = {
        "cuda.matmul.allow_tf32": lambda: cuda.matmul.allow_tf32,
        "cuda.matmul.allow_bf16_reduced_precision_reduction": lambda: (
            cuda.matmul.allow_bf16_reduced_precision_reduction
        ),
        "cuda.preferred_blas_library": lambda: cuda.preferred_blas_library(),
        "cuda.flash_sdp_enabled": cuda.flash_sdp_enabled,
        "cuda.cudnn_sdp_enabled": cuda.cudnn_sdp_enabled,
        "cuda.mem_efficient_sdp_enabled": cuda.mem_efficient_sdp_enabled,
        "cuda.math_sdp_enabled": cuda.math_sdp_enabled,
        "cudnn.enabled": lambda: cudnn.enabled,
        "cudnn.benchmark": lambda: cudnn.benchmark,
        "cudnn.deterministic": lambda: cudnn.deterministic,
        "cudnn.allow_tf32": lambda: cudnn.allow_tf32,
    }
    return {name: _answer(ask) for name, ask in asked.items()}


def _cuda() -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info()
    return {
        "cuda.get_allocator_backend": _answer(torch.cuda.memory.get_allocator_backend),
        "cuda.memory_allocated_gb": round(torch.cuda.memory_allocated() / 1e9, 2),
        "cuda.memory_reserved_gb": round(torch.cuda.memory_reserved() / 1e9, 2),
        "cuda.device_used_gb": round((total - free) / 1e9, 2),
        "cuda.current_stream": torch.cuda.current_stream(),
        "cuda.sync_debug_mode": torch.cuda.get_sync_debug_mode(),
    }


def _config(module: str) -> dict[str, Any]:
    """The plain values of one of torch's config modules, where it is loaded."""
    loaded = sys.modules.get(module)
    if loaded is None:
        return {}
    shallow = getattr(loaded, "shallow_copy_dict", None) or getattr(loaded, "to_dict", None)
    values = _answer(shallow) if shallow is not None else vars(loaded)
    if not isinstance(values, dict):
        return {}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, bool | int | float | str | type(None)) and not name.startswith("__")
    }


def _answer(ask: Callable[[], Any]) -> Any:
    """Or what came in its place: names differ between versions of torch."""
    try:
        return ask()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """One line for each setting that differs."""
    return [
        f"{name}: {before.get(name, '(not there)')} -> {after.get(name, '(not there)')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def host_probes(device: torch.device) -> dict[str, float]:
    """Each the least of five; microseconds, but for the copy and the collection.

    python: a loop of the interpreter. launch: a tiny kernel. autograd: forward and backward of 100
    tiny operations. allocation: a tensor made and dropped. copy: 1 GiB on the device (16 MiB on a
    CPU), in 10^9 bytes a second, read and written. collection: a full one of Python's collector
    over all objects, frozen ones included, in milliseconds.
    """
    small = torch.zeros(16, device=device)
    weight = torch.zeros(16, device=device, requires_grad=True)
    big = torch.zeros(1 << (30 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
    other = torch.empty_like(big)

    def python() -> None:
        total = 0
        for number in range(100_000):
            total += number

    def launch() -> None:
        for _ in range(2000):
            small.add_(1)

    def autograd() -> None:
        for _ in range(20):
            value = weight
            for _ in range(100):
                value = value * 1.0
            value.sum().backward()

    def allocation() -> None:
        for _ in range(2000):
            torch.empty(1 << 20, dtype=torch.uint8, device=device)

    def least(work: Callable[[], object]) -> float:
        return min(seconds_of(work, device=device) for _ in range(5))

    return {
        "python_us": least(python) * 1e6,
        "launch_us": least(launch) / 2000 * 1e6,
        "autograd_us": least(autograd) / 2000 * 1e6,
        "allocation_us": least(allocation) / 2000 * 1e6,
        "copy_gb_per_second": 2 * big.nbytes / least(lambda: other.copy_(big)) / 1e9,
        "collection_ms": _full_collection() * 1e3,
    }


def _full_collection() -> float:
    """Seconds. Afterwards all objects are frozen."""
    gc.unfreeze()
    started = time.perf_counter()
    gc.collect()
    took = time.perf_counter() - started
    gc.freeze()
    return took


class CollectorClock:
    """How long Python's garbage collector ran, and how often, inside `watching`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.collections = [0, 0, 0]
        self._started = 0.0

    def _called(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
            return
        self.seconds += time.perf_counter() - self._started
        self.collections[info["generation"]] += 1

    @contextmanager
    def watching(self) -> Iterator["CollectorClock"]:
        gc.callbacks.append(self._called)
        try:
            yield self
        finally:
            gc.callbacks.remove(self._called)
