"""What every program of ranks does: join the job, work, leave; with one message for a failure."""

import logging
import os
import sys
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
    body: Callable[["DistributedContext", "FailureChannel"], None], *, config: DistributedConfig
) -> int:
    """Run `body` as one rank of the job. Collective over the job's processes.

    Ends the process with exit code 0 where all ranks got through. Where any rank's body raises, all
    end with that rank's message and exit code (distributed/failure.py). Returns an exit code only
    where the job could not be joined.
    """
    keep_warnings_off_the_screen()
    from rlhf_megatron.distributed.failure import FailureChannel
    from rlhf_megatron.distributed.start import finish, start

    try:
        context = start(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    channel = FailureChannel(rank=context.rank, world_size=context.world_size)
    channel.start()
    try:
        import torch.distributed as dist

        body(context, channel)
        dist.barrier()
    except BaseException as error:
        channel.report(error)
    channel.close()
    finish(EXIT_DONE)
    return EXIT_DONE


def keep_warnings_off_the_screen() -> None:
    """Megatron-Core and torch warn dozens of times a rank about what is meant (no Apex, renamed
    collectives): that goes to the rank's log file (observability/logs.py), not over the screen."""
    logging.captureWarnings(True)
    warnings_logger = logging.getLogger("py.warnings")
    warnings_logger.addHandler(logging.NullHandler())
    warnings_logger.propagate = False
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
