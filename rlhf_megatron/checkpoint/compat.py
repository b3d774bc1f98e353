"""What this project has to know of the inside of Megatron-Core's checkpoints, 0.16.1 and 0.19.2."""

import inspect
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

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


class SavePlans:
    """Who writes what of one state that is saved again and again: agreed on twice, then kept.

    Gathering each rank's plan on rank 0 and checking them there is most of what a save holds
    training up for, and comes out the same each time (strategies/torch.py:612, cached_metadata;
    0.19.2: 687).
    """

    def __init__(self) -> None:
        self.strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
        self._parts: list[tuple[Any, ...]] = []

    @property
    def are_kept(self) -> bool:
        """Whether this rank would leave out the agreement in the next save."""
        return bool(self.strategy.validated_cache_reuse)

    def check(self, state: dict[str, Any]) -> None:
        """A plan that is kept would silently leave out what it does not know."""
        parts = [
            (part.key, part.local_shape, part.global_offset, part.replica_id, part.dtype)
            for part in nested_values(state)
            if isinstance(part, ShardedTensor)
        ]
        assert self._parts in ([], parts), "the state has other parts than in the save before"
        self._parts = parts

    def forget_agreement(self) -> None:
        """The next save agrees again, and compares with what was agreed before."""
        self.strategy.validated_cache_reuse = False
        self.strategy.cached_global_metadata = None  # of the first rank alone


def plan_save(
    state: dict[str, Any], *, directory: Path, plans: SavePlans, validate: bool = True
) -> Any:
    """Agree on who writes what into `directory`, which exists and is empty: Megatron-Core's
    AsyncRequest, to be given to `write_files` and `finish_save`. Collective over the job.

    The tensors of `state` must stay as they are until `write_files` is done. plans: of the state's
    earlier saves. validate: compare the ranks' parts, which must cover each tensor once; a look at
    all their keys on all ranks.
    """
    plans.check(state)
    options: dict[str, Any] = {
        "async_sharded_save": True,
        "validate_access_integrity": validate,
        "sharded_strategy": plans.strategy,
    }
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
