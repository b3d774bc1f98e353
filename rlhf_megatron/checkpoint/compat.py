"""What this project has to know of the inside of Megatron-Core's checkpoints, 0.16.1 and 0.19.2."""

import inspect
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async

from rlhf_megatron.checkpoint.pieces import open_in_pieces


@contextmanager
def results_in_this_process() -> Iterator[None]:
    """For the time of a synchronous save: its writers' results go through a queue of this process.

    Megatron-Core would start a manager process on each rank (filesystem_async.py:49; 0.19.2: 53),
    which only an asynchronous save has a use of: it takes seconds and up to 200 MB, since it
    imports the main module again, and nothing ends it when a rank leaves through os._exit.
    """
    saved = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = saved


@contextmanager
def writes_in_pieces() -> Iterator[None]:
    """For the time of a save: Megatron-Core's writers write in pieces (see pieces.py).

    They open their files by the builtin `open`, with no way to say how (filesystem_async.py:382;
    0.19.2: 403), and torch.save writes each tensor as a whole: the module gets an `open` of its
    own. Writers that it forks inherit it.
    """
    vars(filesystem_async)["open"] = open_in_pieces
    try:
        yield
    finally:
        del vars(filesystem_async)["open"]


def plan_save(state: dict[str, Any], *, directory: Path) -> Any:
    """Agree on who writes what into `directory`, which exists and is empty: Megatron-Core's
    AsyncRequest, to be given to `write_files` and `finish_save`. Collective over the job.

    The tensors of `state` must stay as they are until `write_files` is done.
    """
    options: dict[str, Any] = {"async_sharded_save": True}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"  # 0.19.2's default needs nvidia-resiliency-ext
    with results_in_this_process():
        return dist_checkpointing.save(state, str(directory), **options)


def write_files(request: Any) -> list[Path]:
    """Write this rank's files, in this thread; returns them. Not collective.

    Megatron-Core 0.16.1 would fork writers here (filesystem_async.py:239), which neither a process
    with a GPU nor one with threads survives unharmed; 0.19.2 uses threads. Raises what the writing
    raises (OSError, or torch's RuntimeError where a disk is full).
    """
    if request.async_fn is None:
        return []
    transforms = request.async_fn.args[0]
    _, buckets, results = request.async_fn_args
    written: dict[int, Any] = {}
    for number, bucket in enumerate(buckets):
        answers: queue.Queue = queue.Queue()
        count: queue.Queue = queue.Queue()
        count.put(number)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, answers, count, True
        )
        _, answer = answers.get()
        if isinstance(answer, BaseException):
            raise answer
        written[number] = answer
    results.put(written)
    return [Path(bucket[0]) for bucket in buckets]


def finish_save(request: Any) -> None:
    """Write what names the files, once all ranks have written theirs. Collective over the job."""
    for finalize in request.finalize_fns:
        finalize()
