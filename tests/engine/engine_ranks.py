"""Run a function on fresh ranks: vLLM changes a process so much that the tests' own stays out."""

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(
    target: Callable[..., Any], *, world_size: int, scratch: Path, timeout_seconds: float = 400
) -> list[Any]:
    """[target(rank, scratch) of each rank]; fails with the traceback of the first that raises."""
    context = mp.get_context("spawn")
    scratch.mkdir(parents=True, exist_ok=True)
    processes = [
        context.Process(target=_run_rank, args=(target, rank, world_size, scratch))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline and any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            break  # the others would wait for it
        time.sleep(0.1)
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    errors = [path.read_text() for path in sorted(scratch.glob("error_*"))]
    assert not errors, errors[0]
    assert not hung, f"ranks {hung} did not end within {timeout_seconds} s"
    assert [process.exitcode for process in processes] == [0] * world_size
    return [torch.load(scratch / f"result_{r}", weights_only=False) for r in range(world_size)]


def _run_rank(target: Callable[..., Any], rank: int, world_size: int, scratch: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1")
    try:
        store = dist.FileStore(str(scratch / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = target(rank, scratch)
        dist.barrier()
        dist.destroy_process_group()
        torch.save(result, scratch / f"result_{rank}")
    except BaseException:
        (scratch / f"error_{rank}").write_text(traceback.format_exc())
        raise
