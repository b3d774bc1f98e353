"""Ranks for tests of engines, forked from a process that has imported vLLM once.

vLLM changes a process so much that the tests' own stays out, and its import takes ten seconds of a
processor: so one process imports it, and forks the ranks of each test.
"""

import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlhf_megatron.launcher import free_port

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
        ranks = partial(_run_rank, target)
        self._run(ranks, world_size=world_size, scratch=scratch, timeout_seconds=timeout_seconds)
        return [torch.load(scratch / f"result_{r}", weights_only=False) for r in range(world_size)]

    def run_file(self, file: Path, *words: str, world_size: int, scratch: Path) -> None:
        """Run a program on ranks as torchrun would; fails with what it printed unless all end
        with exit code 0."""
        ranks = partial(_run_file, file, list(words), free_port())
        self._run(ranks, world_size=world_size, scratch=scratch, timeout_seconds=LONGEST_SECONDS)

    def _run(
        self, ranks: Callable[..., None], *, world_size: int, scratch: Path, timeout_seconds: float
    ) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self._pipe.send((ranks, world_size, scratch, timeout_seconds))
        problem = self._pipe.recv()
        assert not problem, problem

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
    ranks: Callable[..., None], world_size: int, scratch: Path, timeout_seconds: float
) -> str:
    """Run the ranks to their ends; what went wrong."""
    context = mp.get_context("fork")
    processes = [
        context.Process(target=ranks, args=(rank, world_size, scratch))
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
    said = "".join(path.read_text() for path in sorted(scratch.glob("said_*")))
    return f"exit codes {codes}\n{said}" if any(codes) else ""


def _run_rank(target: Callable[..., Any], rank: int, world_size: int, scratch: Path) -> None:
    _be_rank(rank, world_size=world_size)
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


def _run_file(
    file: Path, words: list[str], port: int, rank: int, world_size: int, scratch: Path
) -> None:
    """What it prints goes to a file; where it fails, the error begins with that."""
    _be_rank(rank, world_size=world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    said = scratch / f"said_{rank}"
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = [str(file), *words]
    sys.path.insert(0, str(file.parent))
    try:
        runpy.run_path(str(file), run_name="__main__")
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        sys.stdout.flush()
        (scratch / f"error_{rank}").write_text(said.read_text() + traceback.format_exc())
        raise


def _be_rank(rank: int, *, world_size: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size))
