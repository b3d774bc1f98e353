"""Ranks for tests: `run_ranks(4, fn, ...)` runs fn(rank, ...) in four processes of one gloo world.

The processes are forked from a server that has imported torch, Megatron-Core and transformers once
(multiprocessing's forkserver), so that a rank starts in a fraction of a second, whatever threads
the tests' own process has.
"""

import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 120.0
HOST = "127.0.0.1"
PRELOADED = [
    "pytest",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "rlhf_megatron.trainer",
]

os.environ.setdefault("OMP_NUM_THREADS", "1")
_context = get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


@dataclass(frozen=True)
class RankEnd:
    """How a process ended."""

    exit_code: int
    stderr: str
    seconds: float


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """Run fn(rank, *args) on each rank; returns the results, rank by rank.

    Raises AssertionError with the traceback of the first rank that fails, or naming the ranks that
    have not ended in time. All processes are gone afterwards.
    """
    store = _new_store()
    ours, theirs = zip(*(_context.Pipe(duplex=False) for _ in range(world_size)), strict=True)
    call = pickle.dumps((fn, args))
    processes = [
        _context.Process(target=_give_result, args=(pipe, rank, world_size, store.port, call))
        for rank, pipe in enumerate(theirs)
    ]
    try:
        for process in processes:
            process.start()
        for pipe in theirs:
            pipe.close()
        return _collect(ours, deadline=time.monotonic() + timeout_seconds)
    finally:
        _end(processes)


def run_until_exit(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    folder: Path,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[RankEnd]:
    """Run fn(rank, *args) on each rank until its process ends by itself, in whatever way.

    What they print to stderr goes through `folder`. Raises AssertionError, naming the ranks that
    have not ended in time; all processes are gone afterwards.
    """
    store, begin = _new_store(), time.monotonic()
    call = pickle.dumps((fn, args))
    files = [folder / f"stderr_{rank}" for rank in range(world_size)]
    processes = [
        _context.Process(target=_run_to_its_end, args=(file, rank, world_size, store.port, call))
        for rank, file in enumerate(files)
    ]
    seconds: dict[int, float] = {}
    try:
        for process in processes:
            process.start()
        while len(seconds) < world_size:
            running = {p.sentinel: rank for rank, p in enumerate(processes) if rank not in seconds}
            left = begin + timeout_seconds - time.monotonic()
            ended = connection.wait(list(running), timeout=max(left, 0))
            assert ended, f"ranks {sorted(running.values())} go on after {timeout_seconds} s"
            seconds |= {running[sentinel]: time.monotonic() - begin for sentinel in ended}
        for process in processes:
            process.join()
        return [
            RankEnd(int(process.exitcode), file.read_text(), seconds[rank])
            for rank, (process, file) in enumerate(zip(processes, files, strict=True))
        ]
    finally:
        _end(processes)


def _new_store() -> dist.TCPStore:
    """The job's store, in this process as it would be in a launcher's."""
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


def _end(processes: list) -> None:
    for process in processes:
        if process.pid is not None:
            process.kill()
            process.join()


def _collect(pipes: tuple, *, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = connection.wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
        assert ready, f"ranks {sorted(waiting.values())} did not end in time"
        for pipe in ready:
            rank = waiting[pipe]
            try:
                error, result = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise AssertionError(f"the process of rank {rank} died") from None
            assert not error, f"rank {rank} of {len(pipes)}:\n{error}"
            results[rank] = result
    return [results[rank] for rank in range(len(pipes))]


def _give_result(pipe: Any, rank: int, world_size: int, port: int, call: bytes) -> None:
    try:
        fn, args = pickle.loads(call)
        _join(rank, world_size=world_size, port=port)
        result = fn(rank, *args)
        # Plain pickle: tensors by value, since this process may be gone before they are read.
        answer = pickle.dumps(("", result))
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        raise SystemExit(1) from None
    pipe.send_bytes(answer)
    # Stay until the tests' process has all results and ends this one: peers may still be talking.
    time.sleep(TIMEOUT_SECONDS)


def _run_to_its_end(file: Path, rank: int, world_size: int, port: int, call: bytes) -> None:
    stderr = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(stderr, 2)
    fn, args = pickle.loads(call)
    _join(rank, world_size=world_size, port=port)
    fn(rank, *args)


def _join(rank: int, *, world_size: int, port: int) -> None:
    """Become a rank of a gloo world on the CPU."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",  # these tests are of the CPU also where there is a GPU
    }
    torch.set_num_threads(1)
    from rlhf_megatron.distributed.cpu_platform import use_cpu_in_place_of_cuda

    use_cpu_in_place_of_cuda()
    store = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("world", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
