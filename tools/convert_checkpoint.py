"""Change the parallel layout of a sharded Megatron-Core checkpoint.

    python tools/convert_checkpoint.py --checkpoint checkpoints/a --output checkpoints/b \\
        --tensor-parallel 8 --pipeline-parallel 1

Loading does the same on its way, so this is for those who want the files cut for one layout: fewer
bytes are read by each rank then. All roles of the checkpoint are converted. Starts one process per
rank of the new layout; over several nodes, start it with torchrun or srun. Needs no GPU.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_megatron.checkpoint.layout_check import check_layout
from rlhf_megatron.checkpoint.manifest import open_role
from rlhf_megatron.checkpoint.paths import ROLES, RoleFolder, check_output, remove_partial
from rlhf_megatron.errors import EXIT_DONE, UserError
from rlhf_megatron.ranks import refuse
from rlhf_megatron.tool_ranks import (
    add_layout_arguments,
    layout_of,
    number_of_processes,
    run_tool_ranks,
)

if TYPE_CHECKING:
    from rlhf_megatron.distributed.failure import FailureChannel
    from rlhf_megatron.distributed.start import DistributedContext


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, in processes other than the ranks."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    try:
        layout = layout_of(options)
        roles = [
            name for name in ROLES if RoleFolder(options.checkpoint / name).manifest.exists()
        ] or list(ROLES[:1])
        checkpoints = [open_role(options.checkpoint, role=name) for name in roles]
        for checkpoint in checkpoints:
            check_layout(checkpoint.arch, layout=layout)
        check_output(options.output, overwrite=options.force, source=options.checkpoint)
        num_processes = number_of_processes(options, layout=layout)
        if options.dry_run:
            from rlhf_megatron.checkpoint.convert_plan import describe_conversion

            for checkpoint in checkpoints:
                print(describe_conversion(checkpoint, output=options.output, layout=layout))
            return EXIT_DONE
    except UserError as error:
        return refuse(error)

    def body(context: "DistributedContext", channel: "FailureChannel") -> None:
        from rlhf_megatron.checkpoint.convert import convert

        channel.clean_up = lambda: remove_partial(options.output)
        convert(
            options.checkpoint,
            output=options.output,
            roles=roles,
            layout=layout,
            overwrite=options.force,
        )
        if context.rank == 0:
            print(f"wrote {options.output}: {', '.join(roles)}")

    return run_tool_ranks(
        body, script=__file__, arguments=words, num_processes=num_processes, output=options.output
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Change the parallel layout of a sharded Megatron-Core checkpoint."
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="checkpoint to read")
    parser.add_argument("--output", type=Path, required=True, help="checkpoint to write")
    add_layout_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
