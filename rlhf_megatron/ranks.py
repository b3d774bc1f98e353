"""What every program of ranks does: join the job, work, leave; with one message for a failure."""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE, UserError

if TYPE_CHECKING:
    from rlhf_megatron.distributed.failure import FailureChannel
    from rlhf_megatron.distributed.start import DistributedContext

OTHERS_WAIT_SECONDS = 3.0
"""How long ranks other than 0 wait where each has found the same error, before they leave."""


def run_ranks(
    body: Callable[["DistributedContext", "FailureChannel"], int | None],
    *,
    config: DistributedConfig,
) -> int:
    """Run `body` as one rank of the job. Collective over the job's processes.

    Ends the process with the exit code that `body` returns, the same on all ranks, where all got
    through (None is 0). Where any rank's body raises, all
    end with that rank's message and exit code (distributed/failure.py). Returns an exit code only
    where the job could not be joined.
    """
    keep_warnings_off_the_screen()
    from rlhf_megatron.distributed.failure import FailureChannel
    from rlhf_megatron.distributed.start import finish, start

    try:
        context = start(config)
    except UserError as error:
        return refuse(error)
    channel = FailureChannel(rank=context.rank, world_size=context.world_size)
    channel.start()
    try:
        import torch.distributed as dist

        exit_code = body(context, channel) or EXIT_DONE
        dist.barrier()
    except BaseException as error:
        channel.report(error)
    channel.close()
    finish(exit_code)
    return exit_code


def refuse(error: UserError) -> int:
    """Say what a rank found wrong before it joined the job, and return the exit code.

    Ranks read the same files and mostly find the same: rank 0 says it, and the first rank of each
    further node, whose disk may differ, adds a line of its own.
    """
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    if rank == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_INPUT
    if local_rank == 0:
        text = f"rank {rank} on {socket.gethostname()}: error: {error}"
        print(text, file=sys.stderr, flush=True)
    time.sleep(OTHERS_WAIT_SECONDS)  # a launcher kills all ranks when one leaves
    return EXIT_BAD_INPUT


def keep_warnings_off_the_screen() -> None:
    """Megatron-Core and torch warn dozens of times a rank about what is meant (no Apex, renamed
    collectives): that goes to the rank's log file (observability/logs.py), not over the screen."""
    logging.captureWarnings(True)
    warnings_logger = logging.getLogger("py.warnings")
    warnings_logger.addHandler(logging.NullHandler())
    warnings_logger.propagate = False
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
