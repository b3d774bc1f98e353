"""GPUs, through torch and through nvidia-smi. Never fails where there are none."""

import subprocess
import time
from collections.abc import Sequence

import torch

from rlhf_megatron.doctor.facts import GpuFacts, SmiFacts

MATMUL_SIZE = 8192
MATMUL_REPEATS = 20
SMI_SECONDS = 30.0

_FIELDS = (
    "uuid",
    "driver_version",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "clocks.sm",
    "clocks.max.sm",
    "temperature.gpu",
)
_SLOWDOWNS = ("hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")


def gather_gpus(indices: Sequence[int], *, measure: bool) -> tuple[GpuFacts, ...]:
    """GPUs by their number among the visible ones. `measure`: time a matrix product, 0.1 s."""
    return tuple(_gpu(index, measure=measure) for index in indices)


def _gpu(index: int, *, measure: bool) -> GpuFacts:
    free, total = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)
    return GpuFacts(
        index=index,
        uuid=plain_uuid(str(getattr(properties, "uuid", f"unknown {index}"))),
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_total_bytes=total,
        memory_free_bytes=free,
        matmul_tflops=measure_matmul(torch.device("cuda", index)) if measure else None,
    )


def plain_uuid(text: str) -> str:
    """nvidia-smi writes GPU-1a2b..., torch 1a2b..."""
    return text.strip().removeprefix("GPU-")


def measure_matmul(device: torch.device) -> float:
    """bf16 product of two square matrices, 10^12 operations a second."""
    size = MATMUL_SIZE
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    for _ in range(3):
        torch.mm(a, a, out=out)
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(MATMUL_REPEATS):
        torch.mm(a, a, out=out)
    torch.cuda.synchronize(device)
    seconds = (time.perf_counter() - begin) / MATMUL_REPEATS
    del a, out
    torch.cuda.empty_cache()
    return 2 * size**3 / seconds / 1e12


def gather_smi() -> tuple[SmiFacts, ...] | None:
    """What nvidia-smi tells of all GPUs of the node. None where there is none or it fails."""
    rows = _query(_FIELDS)
    if rows is None:
        return None
    slowdowns = _slowdowns()
    return tuple(smi_facts(row, slowdowns=slowdowns.get(plain_uuid(row[0]), ())) for row in rows)


def smi_facts(row: Sequence[str], *, slowdowns: tuple[str, ...] = ()) -> SmiFacts:
    """One line of the query: numbers may read [N/A] or [Not Supported]."""
    uuid, driver, ecc, errors, clock, highest, temperature = row
    return SmiFacts(
        uuid=plain_uuid(uuid),
        driver=driver,
        ecc_mode=ecc if ecc in ("Enabled", "Disabled") else None,
        uncorrected_ecc_errors=_number(errors),
        clock_mhz=_number(clock),
        max_clock_mhz=_number(highest),
        temperature_celsius=_number(temperature),
        slowdowns=slowdowns,
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _slowdowns() -> dict[str, tuple[str, ...]]:
    """By GPU, what holds its clock down. Drivers before 535 have another name for the fields."""
    for prefix in ("clocks_event_reasons", "clocks_throttle_reasons"):
        rows = _query(("uuid", *(f"{prefix}.{name}" for name in _SLOWDOWNS)))
        if rows is not None:
            return {
                plain_uuid(row[0]): tuple(
                    name for name, value in zip(_SLOWDOWNS, row[1:], strict=True) if _active(value)
                )
                for row in rows
            }
    return {}


def _active(value: str) -> bool:
    return value == "Active"


def _query(fields: Sequence[str]) -> list[list[str]] | None:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [[part.strip() for part in line.split(",")] for line in ended.stdout.splitlines()]
    if ended.returncode != 0 or any(len(row) != len(fields) for row in rows):
        return None
    return rows
