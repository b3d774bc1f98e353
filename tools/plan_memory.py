"""Show what a run needs on each GPU and node, phase by phase, and what would make it fit.

    python tools/plan_memory.py --config configs/ppo_70b_64gpu.yaml --world-size 64

Reads the configuration and the models' config.json; needs no GPU, no peers and no weights. Takes
the same files and overrides as the training command. Exit code 1: it does not fit.
docs/memory.md says how to read the table.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from rlhf_megatron.architectures import read_architectures, stand_in_folders
from rlhf_megatron.config import Config, load_config
from rlhf_megatron.errors import EXIT_DONE, EXIT_FAILED, ConfigError, UserError
from rlhf_megatron.layout.parallel import parse_ranks
from rlhf_megatron.memory.report import plan_figures
from rlhf_megatron.memory_report import GPU_MEMORY_GB, machine_of, planned, role_models
from rlhf_megatron.ranks import refuse
from rlhf_megatron.validation import load_and_validate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        _check(options)
        world_size = options.world_size or _least_world_size(
            load_config(options.config, overrides=options.overrides)
        )
        config = load_and_validate(
            options.config,
            overrides=options.overrides,
            world_size=world_size,
            check_paths=False,
            check_output=False,
        )
        architectures = read_architectures(config, stand_ins=stand_in_folders(options.config))
        models = role_models(config, architectures=architectures)
    except UserError as error:
        return refuse(error)
    machine = machine_of(
        config,
        world_size=world_size,
        gpu_memory_gb=options.gpu_memory_gb,
        gpus_per_node=min(options.gpus_per_node, world_size),
        host_memory_gb=options.host_memory_gb,
        device=options.device,
    )
    found = planned(config, models=models, machine=machine, lora_rank=options.lora_rank)
    if options.json:
        print(json.dumps(plan_figures(found.plan, advice=found.advice)))
    else:
        print("\n".join([*architectures.notes, str(found)]))
    return EXIT_DONE if found.plan.fits else EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Show what a run needs on each GPU and node, and what would make it fit."
    )
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML file; given several times, later files override earlier ones",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        default=None,
        metavar="N",
        help="processes, one a GPU (default: as many as the actor's layout takes at least)",
    )
    parser.add_argument(
        "--gpu-memory-gb",
        type=float,
        default=GPU_MEMORY_GB,
        metavar="GB",
        help=f"of one GPU, in 10^9 bytes (default: {GPU_MEMORY_GB:.0f})",
    )
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument(
        "--host-memory-gb",
        type=float,
        default=0.0,
        metavar="GB",
        help="of a node; checked where given",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="default: distributed.device, where auto means a GPU",
    )
    parser.add_argument(
        "--lora-rank",
        type=int,
        default=0,
        metavar="R",
        help="plan actor and critic with adapters of rank R (for planning: the trainer has none)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="override keys of the configuration"
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    problems = [
        f"{name} {value}: must be {rule}"
        for name, value, is_right, rule in (
            (
                "--world-size",
                options.world_size,
                options.world_size is None or options.world_size > 0,
                "1 or more",
            ),
            ("--gpu-memory-gb", options.gpu_memory_gb, options.gpu_memory_gb > 0, "above 0"),
            ("--gpus-per-node", options.gpus_per_node, options.gpus_per_node > 0, "1 or more"),
            ("--host-memory-gb", options.host_memory_gb, options.host_memory_gb >= 0, "0 or more"),
            ("--lora-rank", options.lora_rank, options.lora_rank >= 0, "0 or more"),
        )
        if not is_right
    ]
    if problems:
        raise ConfigError(problems)


def _least_world_size(config: Config) -> int:
    """Of the actor's layout, with one replica where it does not say how many."""
    parallel = config.actor.parallel
    if parallel.ranks.strip() != "all":
        return max(parse_ranks(parallel.ranks, default=())) + 1
    return (
        parallel.tensor_model_parallel_size
        * parallel.pipeline_model_parallel_size
        * max(1, parallel.data_parallel_size)
    )


if __name__ == "__main__":
    sys.exit(main())
