"""What this project has to know of the inside of Megatron-Core's checkpoints, 0.16.1 and 0.19.2."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager

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
