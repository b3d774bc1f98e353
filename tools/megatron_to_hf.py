"""Turn a sharded Megatron-Core checkpoint into a Hugging Face directory.

    python tools/megatron_to_hf.py --checkpoint checkpoints/llama-8b --output models/llama-8b

Works with any number of processes, whatever layout wrote the checkpoint: the files are written in a
stream, and a process holds one parameter at a time. Needs no GPU. Over several nodes, start it with
torchrun or srun. A critic becomes a sequence-classification model with one label; so does, with
--role critic, the backbone of a checkpoint whose actor has the value head (critic.shared_backbone).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_megatron.checkpoint.manifest import open_role_for_export
from rlhf_megatron.checkpoint.paths import ROLES, check_output, remove_partial
from rlhf_megatron.errors import EXIT_DONE, UserError
from rlhf_megatron.ranks import refuse
from rlhf_megatron.tool_ranks import add_common_arguments, run_tool_ranks

if TYPE_CHECKING:
    from rlhf_megatron.distributed.failure import FailureChannel
    from rlhf_megatron.distributed.start import DistributedContext

DEFAULT_PROCESSES = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, in processes other than the ranks."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    max_shard_bytes = 1e9 * options.max_shard_gb
    try:
        checkpoint = open_role_for_export(options.checkpoint, role=options.role)
        check_output(options.output, overwrite=options.force, source=options.checkpoint)
        if options.dry_run:
            from rlhf_megatron.checkpoint.convert_plan import describe_export

            print(
                describe_export(checkpoint, output=options.output, max_shard_bytes=max_shard_bytes)
            )
            return EXIT_DONE
    except UserError as error:
        return refuse(error)

    def body(context: "DistributedContext", channel: "FailureChannel") -> None:
        from rlhf_megatron.checkpoint.convert import export_sharded

        channel.clean_up = lambda: remove_partial(options.output)
        export_sharded(
            options.checkpoint,
            output=options.output,
            role=options.role,
            max_shard_bytes=max_shard_bytes,
            ranks_per_node=context.local_world_size,
            overwrite=options.force,
        )
        if context.rank == 0:
            print(f"wrote {options.output}")

    return run_tool_ranks(
        body,
        script=__file__,
        arguments=words,
        num_processes=options.nproc_per_node or min(DEFAULT_PROCESSES, os.cpu_count() or 1),
        output=options.output,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Turn a sharded Megatron-Core checkpoint into a Hugging Face directory."
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint to read")
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument(
        "--role", choices=ROLES, help="whose weights (default: the only ones there are)"
    )
    parser.add_argument(
        "--max-shard-gb",
        type=_positive_number,
        default=5.0,
        metavar="GB",
        help="largest safetensors file, in 1e9 bytes (default: 5)",
    )
    add_common_arguments(parser, processes=f"{DEFAULT_PROCESSES}, or one a CPU core if fewer")
    return parser


def _positive_number(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return number


if __name__ == "__main__":
    sys.exit(main())
