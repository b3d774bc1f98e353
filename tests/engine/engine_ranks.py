"""Ranks for tests of engines, forked from a process that has imported vLLM once.

vLLM changes a process so much that the tests' own stays out, and its import takes ten seconds of a
processor: so one process imports it, and forks the ranks of each test.
"""

import os
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LONGEST_SECONDS = 240.0


class RankForker:
    """The process that forks ranks; `close` ends it."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_fork_ranks, args=(theirs,))
        self._process.start()
        theirs.close()

    def run(
        self,
        target: Callable[..., Any],
        *,
        world_size: int,
        scratch: Path,
        timeout_seconds: float = LONGEST_SECONDS,
    ) -> list[Any]:
        """[target(rank, scratch) of each rank]; fails with the traceback of the first that
        raises."""
        scratch.mkdir(parents=True, exist_ok=True)
        self._pipe.send((target, world_size, scratch, timeout_seconds))
        problem = self._pipe.recv()
        assert not problem, problem
        return [torch.load(scratch / f"result_{r}", weights_only=False) for r in range(world_size)]

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def _fork_ranks(pipe: Any) -> None:
    """Until the other end of the pipe is closed: run what comes through it, answer what is
    wrong."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    import rlhf_megatron.trainer  # noqa: F401 - as in a training process, before vLLM

    if find_spec("vllm") is not None:
        from rlhf_megatron.rollout.vllm_fit import import_vllm

        import_vllm(device=torch.device("cpu"))
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        pipe.send(_problem_of(*call))


def _problem_of(
    target: Callable[..., Any], world_size: int, scratch: Path, timeout_seconds: float
) -> str:
    """Run the ranks to their ends; what went wrong."""
    context = mp.get_context("fork")
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
    codes = [process.exitcode for process in processes]
    if errors:
        return errors[0]
    if hung:
        return f"ranks {hung} did not end within {timeout_seconds} s; exit codes {codes}"
    return f"exit codes {codes}" if any(codes) else ""


def _run_rank(target: Callable[..., Any], rank: int, world_size: int, scratch: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size))
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
