"""What the conversion tools share: their parallel options, and the start of their ranks.

A tool starts its ranks on this node by itself, or is itself a rank that torchrun or srun started.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_megatron.checkpoint.paths import remove_partial
from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.errors import UserError
from rlhf_megatron.launcher import launch
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.ranks import run_ranks

if TYPE_CHECKING:
    from rlhf_megatron.distributed.failure import FailureChannel
    from rlhf_megatron.distributed.start import DistributedContext


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """The layout to write, and what all conversions take."""
    for name, help_text in (
        ("--tensor-parallel", "ranks that share each layer's matrices"),
        ("--pipeline-parallel", "pipeline stages"),
        ("--virtual-pipeline", "model chunks per stage"),
    ):
        parser.add_argument(
            name, type=_positive, default=1, metavar="N", help=f"{help_text} (default: 1)"
        )
    add_common_arguments(parser, processes="tensor-parallel x pipeline-parallel")


def add_common_arguments(parser: argparse.ArgumentParser, *, processes: str) -> None:
    """Options of every conversion. `processes`: the default number of processes, in words."""
    parser.add_argument(
        "--nproc-per-node",
        type=_positive,
        metavar="N",
        help=f"processes to start on this node (default: {processes})",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the output directory if it exists"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check the input; print the plan and the sizes"
    )


def layout_of(options: argparse.Namespace) -> ParallelLayout:
    """The layout of the options, over ranks 0 to T*P - 1. Raises UserError."""
    tp, pp = options.tensor_parallel, options.pipeline_parallel
    if options.virtual_pipeline > 1 and pp == 1:
        raise UserError(
            f"--virtual-pipeline {options.virtual_pipeline}: needs --pipeline-parallel above 1"
        )
    return ParallelLayout(
        tuple(range(tp * pp)),
        tp,
        pp,
        virtual_pipeline_model_parallel_size=options.virtual_pipeline,
    )


def number_of_processes(options: argparse.Namespace, *, layout: ParallelLayout) -> int:
    """Processes to start for a layout: one a rank. Raises UserError where another number was asked
    for, or started."""
    needed = len(layout.ranks)
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    started = os.environ.get("WORLD_SIZE")
    if options.dry_run:
        return 1
    if started is not None and int(started) != needed:
        raise UserError(f"started as {started} processes; the layout needs {tp} x {pp} = {needed}")
    if started is None and options.nproc_per_node not in (None, needed):
        raise UserError(
            f"--nproc-per-node {options.nproc_per_node}: the layout needs {tp} x {pp} = {needed}"
        )
    return needed


def run_tool_ranks(
    body: Callable[["DistributedContext", "FailureChannel"], None],
    *,
    script: str,
    arguments: Sequence[str],
    num_processes: int,
    output: Path,
) -> int:
    """Run `body` on the ranks and return the exit code; what an end by a signal has left of
    `output` goes. `script` and `arguments`: how to start a rank."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # weights are converted in host memory
    if num_processes == 1 or "WORLD_SIZE" in os.environ:
        return run_ranks(body, config=DistributedConfig(device="cpu"))
    command = [sys.executable, script, *arguments]
    exit_code = launch(command, num_processes=num_processes)
    if exit_code:
        remove_partial(output)
    return exit_code


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return number
