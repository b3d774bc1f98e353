"""Forked gloo ranks for tests: `run_ranks(4, fn, ...)` runs fn(rank, ...) on each."""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

TIMEOUT = timedelta(seconds=120)


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Run fn(rank, *args) in `world_size` processes of one gloo world; returns the results.

    The first exception of any rank is raised here as AssertionError, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.start_processes(
            _rank_main,
            args=(world_size, folder, fn, args),
            nprocs=world_size,
            start_method="fork",
            join=False,
        )
        failed = None
        try:
            while not context.join():
                pass
        except Exception as error:
            failed = error
        errors = sorted(Path(folder).glob("error_*"), key=lambda path: path.stat().st_mtime_ns)
        assert not errors, errors[0].read_text()
        assert failed is None, failed
        return [
            pickle.loads((Path(folder) / f"result_{rank}").read_bytes())
            for rank in range(world_size)
        ]


def _rank_main(
    rank: int, world_size: int, folder: str, fn: Callable[..., Any], args: tuple
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )
        result = fn(rank, *args)
        (Path(folder) / f"result_{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"error_{rank}").write_text(f"rank {rank}\n{traceback.format_exc()}")
        raise
