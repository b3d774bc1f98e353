"""Ranks for tests: `run_ranks(4, fn, ...)` runs fn(rank, ...) in four processes of one gloo world.

The processes are forked from a server that has imported torch, Megatron-Core and transformers once
(multiprocessing's forkserver), so that a rank starts in a fraction of a second, whatever threads
the tests' own process has.
"""

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.launcher import free_port

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

    exit_code: int | None
    """None where it had not ended in time."""
    stdout: str
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


def run_side_by_side(
    world_size: int,
    calls: Mapping[Any, tuple],
    *,
    folder: Path,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> dict[Any, list[RankEnd]]:
    """For each (fn, *args): run fn(rank, *args) on ranks of its own until their processes end by
    themselves, in whatever way. All at once: they should mostly wait.

    What they print goes through `folder`. All processes are gone afterwards.
    """
    stores = [_new_store() for _ in calls]
    ranks = {
        (key, rank): _start(
            _run_to_its_end,
            folder / f"{number}_{rank}",
            (rank, world_size, stores[number].port, pickle.dumps((fn, args))),
        )
        for number, (key, (fn, *args)) in enumerate(calls.items())
        for rank in range(world_size)
    }
    ends = _ends_of(ranks, timeout_seconds=timeout_seconds)
    return {key: [ends[key, rank] for rank in range(world_size)] for key in calls}


def run_until_exit(
    world_size: int, fn: Callable[..., Any], *args: Any, folder: Path
) -> list[RankEnd]:
    """`run_side_by_side` of one call."""
    return run_side_by_side(world_size, {"": (fn, *args)}, folder=folder)[""]


def run_program(words: Sequence[str], *, world_size: int, folder: Path) -> list[RankEnd]:
    """The training program with these arguments on each rank, as its launcher starts it."""
    port = free_port()
    ranks = {
        rank: _start(_run_program, folder / str(rank), (rank, world_size, port, list(words)))
        for rank in range(world_size)
    }
    ends = _ends_of(ranks, timeout_seconds=TIMEOUT_SECONDS)
    return [ends[rank] for rank in range(world_size)]


@dataclass(frozen=True)
class _Started:
    process: Any
    files: Path
    """Beginning of the names of those that take what it prints."""
    at: float


def _start(target: Callable[..., Any], files: Path, args: tuple) -> _Started:
    for descriptor in (1, 2):
        _printed_file(files, descriptor).write_text("")
    process = _context.Process(target=target, args=(files, *args))
    process.start()
    return _Started(process, files, time.monotonic())


def _ends_of(ranks: Mapping[Any, _Started], *, timeout_seconds: float) -> dict[Any, RankEnd]:
    """Wait for all; those that have not ended in time are ended."""
    deadline = time.monotonic() + timeout_seconds
    seconds: dict[Any, float] = {}
    try:
        while left := {r.process.sentinel: key for key, r in ranks.items() if key not in seconds}:
            ended = connection.wait(list(left), timeout=max(deadline - time.monotonic(), 0))
            if not ended:
                break
            for key in (left[sentinel] for sentinel in ended):
                seconds[key] = time.monotonic() - ranks[key].at
    finally:
        _end([r.process for r in ranks.values()])
    return {
        key: RankEnd(
            int(r.process.exitcode) if key in seconds else None,
            *(_printed_file(r.files, descriptor).read_text() for descriptor in (1, 2)),
            seconds.get(key, timeout_seconds),
        )
        for key, r in ranks.items()
    }


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


def _run_to_its_end(files: Path, rank: int, world_size: int, port: int, call: bytes) -> None:
    _redirect(files)
    fn, args = pickle.loads(call)
    _join(rank, world_size=world_size, port=port)
    fn(rank, *args)


def _run_program(files: Path, rank: int, world_size: int, port: int, words: list[str]) -> None:
    _redirect(files)
    _set_environment(rank, world_size=world_size, port=port)
    torch.set_num_threads(1)
    from rlhf_megatron.main import main

    code = main(words)
    sys.stdout.flush()
    os._exit(code)


def _redirect(files: Path) -> None:
    for descriptor in (1, 2):
        file = os.open(_printed_file(files, descriptor), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)


def _printed_file(files: Path, descriptor: int) -> Path:
    return files.with_name(f"{files.name}_{descriptor}.txt")


def _set_environment(rank: int, *, world_size: int, port: int) -> None:
    """As a launcher does."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",  # these tests are of the CPU also where there is a GPU
    }


def _join(rank: int, *, world_size: int, port: int) -> None:
    """Become a rank of a gloo world on the CPU."""
    _set_environment(rank, world_size=world_size, port=port)
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
