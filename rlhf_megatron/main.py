"""The training program: parse, check, start, train; with one message for whatever goes wrong."""

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence

from rlhf_megatron.architectures import read_architectures
from rlhf_megatron.config import Config, resolved_yaml
from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE, UserError
from rlhf_megatron.resolve import describe_batch
from rlhf_megatron.validation import load_and_validate

OTHERS_WAIT_SECONDS = 3.0


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
        return _refuse(error)
    return train(config)


def _refuse(error: UserError) -> int:
    """Every process reads the same files, so each finds the same fault: one of them says it."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(OTHERS_WAIT_SECONDS)  # a launcher kills all ranks when one leaves
    return EXIT_BAD_INPUT


def train(config: Config) -> int:
    """Join the job and train. Does not return where any rank fails: failure.py ends them all."""
    _keep_warnings_off_the_screen()
    from rlhf_megatron.distributed.failure import FailureChannel
    from rlhf_megatron.distributed.seeds import seed_everything
    from rlhf_megatron.distributed.start import finish, start
    from rlhf_megatron.observability.ledger import PhaseLedger
    from rlhf_megatron.observability.logs import setup_logging

    try:
        context = start(config.distributed)
    except UserError as error:
        return _refuse(error)
    ledger = PhaseLedger(rank=context.rank, device=context.device)
    channel = FailureChannel(
        rank=context.rank,
        world_size=context.world_size,
        current_phase=lambda: ledger.current_phase or "setup",
    )
    channel.start()
    try:
        import torch.distributed as dist

        from rlhf_megatron.run_folder import prepare_run_folder
        from rlhf_megatron.trainer import Trainer

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
        dist.barrier()
    except BaseException as error:
        channel.report(error)
    channel.close()
    finish(EXIT_DONE)
    return EXIT_DONE


def _keep_warnings_off_the_screen() -> None:
    """Megatron-Core and torch warn dozens of times a rank about what is meant (no Apex, renamed
    collectives): that goes to the rank's log file (observability/logs.py), not over the table."""
    logging.captureWarnings(True)
    warnings_logger = logging.getLogger("py.warnings")
    warnings_logger.addHandler(logging.NullHandler())
    warnings_logger.propagate = False
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


if __name__ == "__main__":
    sys.exit(main())
