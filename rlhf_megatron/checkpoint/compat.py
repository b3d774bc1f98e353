"""What this project has to know of the inside of Megatron-Core's checkpoints, 0.16.1 and 0.19.2."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.dist_checkpointing.strategies import filesystem_async


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
