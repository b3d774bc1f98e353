"""The training program: parse, check, start, train; with one message for whatever goes wrong."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rlhf_megatron.architectures import Architectures, read_architectures, stand_in_folders
from rlhf_megatron.config import Config
from rlhf_megatron.config_names import answer
from rlhf_megatron.data.same_tokenizer import check_same_tokenizers
from rlhf_megatron.environment import adopt_slurm_environment
from rlhf_megatron.errors import EXIT_DONE, EXIT_STOPPED_RESUMABLE, UserError
from rlhf_megatron.ranks import refuse, run_ranks
from rlhf_megatron.resolve import describe_batch
from rlhf_megatron.role_ranks import role_placement
from rlhf_megatron.validation import load_and_validate

if TYPE_CHECKING:
    from rlhf_megatron.distributed.failure import FailureChannel
    from rlhf_megatron.distributed.start import DistributedContext


class Parser(argparse.ArgumentParser):
    """Raises UserError on bad usage, which one rank then shows for all."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: -"):
            option = message.split()[2].partition("=")[0]
            known = answer(option)
            message += "; keys are given as key.path=value"
            message += f"; {option}: {known.text}" if known else ""
        raise UserError(f"{message}; see --help")


def parser() -> argparse.ArgumentParser:
    """The command line of launch/train.py and `rlhf-megatron train`."""
    found = Parser(
        description="PPO of a language model: one process per GPU, started by torchrun or srun, or "
        "on one node by `rlhf-megatron train --nproc-per-node N`."
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
        "--gpu-memory-gb",
        type=float,
        default=80.0,
        metavar="GB",
        help="of a GPU to plan for in a dry run, in 10^9 bytes (default: 80)",
    )
    found.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="override keys of the configuration"
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Collective over the job's processes."""
    try:
        adopt_slurm_environment()
        options = parser().parse_intermixed_args(arguments)
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if options.world_size is not None and options.world_size < 1:
            raise UserError(f"--world-size {options.world_size}: must be 1 or more")
        config = load_and_validate(
            options.config,
            overrides=options.overrides,
            world_size=options.world_size or started if options.dry_run else started,
            check_paths=not options.dry_run,
        )
        if options.dry_run:
            from rlhf_megatron.dry_run import describe

            if not options.gpu_memory_gb > 0:
                raise UserError(f"--gpu-memory-gb {options.gpu_memory_gb}: must be above 0")
            _print_to_reader(
                describe(
                    config,
                    world_size=options.world_size or started,
                    stand_ins=stand_in_folders(options.config),
                    gpu_memory_gb=options.gpu_memory_gb,
                )
            )
            return EXIT_DONE
        architectures = read_architectures(config)
        check_same_tokenizers(config)
    except UserError as error:
        return refuse(error)
    return train(config, architectures=architectures)


def _print_to_reader(text: str) -> None:
    """Print it; a reader that has seen enough, such as head, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python's exit would try again


def train(config: Config, *, architectures: Architectures) -> int:
    """Join the job and train. Does not return where any rank fails: failure.py ends them all."""

    def body(context: "DistributedContext", channel: "FailureChannel") -> int:
        import torch.distributed as dist

        from rlhf_megatron.distributed.seeds import seed_everything
        from rlhf_megatron.doctor.at_start import check_machines
        from rlhf_megatron.memory_report import planned_peaks, suggested, write_planned_peaks
        from rlhf_megatron.observability.ledger import PhaseLedger
        from rlhf_megatron.observability.logs import rank_log, setup_logging
        from rlhf_megatron.observability.trace import trace_at_end
        from rlhf_megatron.out_of_memory import OutOfMemoryReport
        from rlhf_megatron.phase_limits import position_of
        from rlhf_megatron.resume import find_resume_point
        from rlhf_megatron.run_folder import open_run_folder
        from rlhf_megatron.stopping import RunStopped, StopAgreement, StopSignals, slurm_time_limit
        from rlhf_megatron.trainer import Trainer

        signals = StopSignals()
        if config.doctor.at_start:
            check_machines(config, architectures=architectures, context=context, channel=channel)
        placement = role_placement(config, world_size=context.world_size)
        ledger = PhaseLedger(rank=context.rank, device=context.device, apart=placement.phases_apart)
        channel.position = lambda: position_of(ledger, config=config)
        channel.hide = config.secrets.hide
        point = find_resume_point(config, context=context)
        if context.rank == 0:
            open_run_folder(config, point=point)
            write_planned_peaks(config, world_size=context.world_size)
            print(describe_batch(config, world_size=context.world_size), flush=True)
        dist.barrier()
        setup_logging(config.run.output_dir, rank=context.rank, hide=config.secrets.hide)
        log = rank_log(config.run.output_dir, rank=context.rank)
        channel.write_stacks_into(log.open("a", encoding="utf-8"))
        stop = StopAgreement(
            signals=signals,
            time_limit=slurm_time_limit(stop_before_minutes=config.checkpoint.stop_before_minutes),
            group=context.job_group,
            device=context.device,
        )
        seed_everything(config.run.seed)
        memory = OutOfMemoryReport(
            config, context=context, ledger=ledger, suggest=suggested, planned_peaks=planned_peaks
        )
        try:
            Trainer(config, context=context, ledger=ledger, stop=stop, resume=point).fit()
        except RunStopped as stopped:
            if context.rank == 0:
                print(stopped, flush=True)
                trace_at_end(Path(config.run.output_dir), steps=config.logging.trace_steps)
            return EXIT_STOPPED_RESUMABLE
        except Exception as error:
            memory.raise_for(error)
            raise
        return EXIT_DONE

    return run_ranks(body, config=config.distributed)


if __name__ == "__main__":
    sys.exit(main())
