"""The training program: parse, check, start, train; with one message for whatever goes wrong."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_megatron.architectures import read_architectures
from rlhf_megatron.config import Config, resolved_yaml
from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE, UserError
from rlhf_megatron.ranks import OTHERS_WAIT_SECONDS, run_ranks
from rlhf_megatron.resolve import describe_batch
from rlhf_megatron.validation import load_and_validate

if TYPE_CHECKING:
    from rlhf_megatron.distributed.failure import FailureChannel
    from rlhf_megatron.distributed.start import DistributedContext


def parser() -> argparse.ArgumentParser:
    """The command line of launch/train.py and `rlhf-megatron train`."""
    found = argparse.ArgumentParser(
        description="PPO of a language model: one process per GPU, started by torchrun or srun."
    )
    found.add_argument(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML file; given several times, later files override earlier ones",
    )
    found.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything and print what would run; needs no GPU and no peers",
    )
    found.add_argument(
        "--world-size",
        type=int,
        default=None,
        help="processes to plan for in a dry run (default: as started)",
    )
    found.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="override keys of the configuration"
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Collective over the job's processes."""
    options = parser().parse_args(arguments)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    is_main = int(os.environ.get("RANK", "0")) == 0
    try:
        config = load_and_validate(
            options.config,
            overrides=options.overrides,
            world_size=options.world_size or started if options.dry_run else started,
            check_output=not options.dry_run,
        )
        if options.dry_run:
            from rlhf_megatron.dry_run import describe

            print(describe(config, world_size=options.world_size or started))
            return EXIT_DONE
        read_architectures(config)
    except UserError as error:
        # Every process reads the same files, so each finds the same: one of them says it.
        if is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(OTHERS_WAIT_SECONDS)  # a launcher kills all ranks when one leaves
        return EXIT_BAD_INPUT
    return train(config)


def train(config: Config) -> int:
    """Join the job and train. Does not return where any rank fails: failure.py ends them all."""

    def body(context: "DistributedContext", channel: "FailureChannel") -> None:
        import torch.distributed as dist

        from rlhf_megatron.distributed.seeds import seed_everything
        from rlhf_megatron.observability.ledger import PhaseLedger
        from rlhf_megatron.observability.logs import setup_logging
        from rlhf_megatron.run_folder import prepare_run_folder
        from rlhf_megatron.trainer import Trainer

        ledger = PhaseLedger(rank=context.rank, device=context.device)
        channel.current_phase = lambda: ledger.current_phase or "setup"
        if context.rank == 0:
            prepare_run_folder(
                config.run.output_dir,
                overwrite=config.run.overwrite,
                resolved_yaml=resolved_yaml(config),
            )
            print(describe_batch(config, world_size=context.world_size), flush=True)
        dist.barrier()
        setup_logging(config.run.output_dir, rank=context.rank)
        seed_everything(config.run.seed)
        Trainer(config, context=context, ledger=ledger).fit()

    return run_ranks(body, config=config.distributed)


if __name__ == "__main__":
    sys.exit(main())
