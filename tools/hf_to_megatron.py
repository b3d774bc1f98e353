"""Turn a Hugging Face directory into a sharded Megatron-Core checkpoint.

    python tools/hf_to_megatron.py --model models/llama-8b --output checkpoints/llama-8b \\
        --tensor-parallel 4 --pipeline-parallel 2

Starts tensor-parallel x pipeline-parallel processes on this node by itself; over several nodes,
start it with torchrun or srun, which give each process its rank. Needs no GPU. Each process reads
its own slices of the safetensors (or .bin) files; the memory needed is that of the weights.
The checkpoint can be loaded at any other layout.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_megatron.checkpoint.layout_check import check_layout
from rlhf_megatron.checkpoint.paths import ROLES, check_output, remove_partial
from rlhf_megatron.errors import EXIT_DONE, UserError
from rlhf_megatron.layout.architecture import ModelArchitecture, read_architecture
from rlhf_megatron.layout.parallel import ParallelLayout
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

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
STORED_AS = {"bfloat16": "bfloat16", "float32": "float32", "float16": "float32"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, in processes other than the ranks."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    try:
        layout = layout_of(options)
        arch = read_architecture(options.model)
        dtype = _dtype(arch, wanted=options.dtype, model=options.model)
        check_output(options.output, overwrite=options.force, source=options.model)
        check_layout(arch, layout=layout)
        num_processes = number_of_processes(options, layout=layout)
        if options.dry_run:
            print(_plan(options, arch=arch, layout=layout, dtype=dtype))
            return EXIT_DONE
    except UserError as error:
        return refuse(error)

    def body(context: "DistributedContext", channel: "FailureChannel") -> None:
        from rlhf_megatron.checkpoint.convert import import_hf

        channel.clean_up = lambda: remove_partial(options.output)
        report = import_hf(
            options.model,
            output=options.output,
            role=options.role,
            layout=layout,
            dtype=dtype,
            overwrite=options.force,
        )
        if context.rank == 0:
            print(f"wrote {options.output / options.role}")
            if options.role == "critic" and not report.value_head_loaded:
                print("the value head is new: the model has none, it starts at 0")

    return run_tool_ranks(
        body, script=__file__, arguments=words, num_processes=num_processes, output=options.output
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Turn a Hugging Face directory into a sharded Megatron-Core checkpoint."
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory to read")
    parser.add_argument("--output", type=Path, required=True, help="checkpoint directory to write")
    add_layout_arguments(parser)
    parser.add_argument(
        "--role",
        choices=ROLES,
        default="actor",
        help="critic: with a scalar head in place of the output layer (default: actor)",
    )
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="of the weights written (default: as stored; float16 becomes fp32, which holds it)",
    )
    return parser


def _dtype(arch: ModelArchitecture, *, wanted: str | None, model: Path) -> str:
    if wanted is not None:
        return DTYPES[wanted]
    if arch.dtype not in STORED_AS:
        raise UserError(f"{model}: dtype {arch.dtype!r} is not known; give --dtype")
    return STORED_AS[arch.dtype]


def _plan(
    options: argparse.Namespace, *, arch: ModelArchitecture, layout: ParallelLayout, dtype: str
) -> str:
    """What --dry-run prints, after the same checks of the files as in a conversion."""
    from rlhf_megatron.checkpoint.convert_plan import describe_import

    return describe_import(
        options.model,
        output=options.output / options.role,
        arch=arch,
        role=options.role,
        layout=layout,
        dtype=dtype,
    )


if __name__ == "__main__":
    sys.exit(main())
