"""Look for what is wrong with the machines before a run does: versions, GPUs, network, disk, files.

    python tools/doctor.py                                  # this machine alone, all its GPUs
    torchrun --nproc-per-node 8 tools/doctor.py --config configs/ppo_8b_8gpu.yaml
    srun --ntasks-per-node=1 python tools/doctor.py --node-only --config ...

Started as ranks of a job (torchrun, srun with one task per GPU, or --nproc-per-node N on this node)
it also compares them and measures all-reduce and all-gather. One table, red lines first. Exit code:
0 go, 1 no-go, 2 bad usage or configuration. docs/doctor.md says what is looked at.
"""

import os
import socket
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout, uninstalled

from rlhf_megatron.architectures import Architectures, read_architectures
from rlhf_megatron.config import Config, load_config
from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.doctor.config import DoctorConfig
from rlhf_megatron.doctor.facts import Needs
from rlhf_megatron.doctor.needs import needs_of, smallest_world
from rlhf_megatron.doctor.report import Report
from rlhf_megatron.environment import adopt_slurm_environment
from rlhf_megatron.errors import EXIT_DONE, EXIT_FAILED, UserError
from rlhf_megatron.launcher import launch
from rlhf_megatron.main import Parser
from rlhf_megatron.ranks import refuse, run_ranks
from rlhf_megatron.validation import load_and_validate

if TYPE_CHECKING:
    from rlhf_megatron.distributed.failure import FailureChannel
    from rlhf_megatron.distributed.start import DistributedContext


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Collective over the job's processes."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = _parser().parse_intermixed_args(words)
        if not options.node_only:
            adopt_slurm_environment()
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if options.nproc_per_node > 1 and started == 1 and not options.node_only:
            command = [sys.executable, str(Path(__file__).resolve()), *words]
            return launch(command, num_processes=options.nproc_per_node)
        alone = options.node_only or started == 1
        config = _config(options, started=None if alone else started)
        needs = _needs(config, world_size=options.world_size or started)
    except UserError as error:
        return refuse(error)
    return _alone(options, config, needs) if alone else _as_rank(options, config, needs)


def _parser() -> Parser:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="the run's configuration; without one only the machines are looked at",
    )
    parser.add_argument(
        "--node-only",
        action="store_true",
        help="look at this machine alone, whatever has started this process",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        default=1,
        metavar="N",
        help="start N ranks on this node, to measure between them",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        default=None,
        help="ranks of the run that is planned (default: as started; alone: what fits)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only what is looked at when a job starts: no speeds, no imports; seconds",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="override keys of the configuration"
    )
    return parser


def _config(options: Namespace, *, started: int | None) -> Config | None:
    """Checked but for its paths, which each node is to look at. Raises UserError.

    `started`: ranks of the job; None where this process is alone.
    """
    if not options.config:
        if options.overrides:
            raise UserError(f"{options.overrides[0]}: overrides need a --config to override")
        return None
    world_size = options.world_size or started
    if world_size is None:
        loaded = load_config(options.config, overrides=options.overrides)
        world_size = smallest_world(loaded)
    return load_and_validate(
        options.config, overrides=options.overrides, world_size=world_size, check_paths=False
    )


def _needs(config: Config | None, *, world_size: int) -> Needs:
    if config is None:
        return Needs(config=DoctorConfig())
    return needs_of(config, architectures=_architectures(config), world_size=world_size)


def _architectures(config: Config) -> Architectures | None:
    """None where this node does not see a model, which the report will say. Raises UserError where
    the model is not one that can be trained so."""
    paths = [config.actor.model, config.critic.model, config.ref.model]
    if not all((Path(path) / "config.json").is_file() for path in paths if path):
        return None
    return read_architectures(config)


def _alone(options: Namespace, config: Config | None, needs: Needs) -> int:
    if int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))) > 0:
        return EXIT_DONE  # one process of a node is enough
    from rlhf_megatron.doctor.examine import examine_node

    report = examine_node(config, needs=needs, full=not options.quick)
    _print(report, as_json=options.json)
    return report.exit_code


def _as_rank(options: Namespace, config: Config | None, needs: Needs) -> int:
    """As a rank of the job; ends the process where the ranks have come together."""
    distributed = config.distributed if config is not None else DistributedConfig()
    timeout = needs.config.timeout_seconds
    distributed = replace(
        distributed,
        timeout_seconds=min(distributed.timeout_seconds, 4 * timeout),
        join_timeout_seconds=min(distributed.join_timeout_seconds, timeout),
    )

    def body(context: "DistributedContext", channel: "FailureChannel") -> int:
        from rlhf_megatron.doctor.examine import examine_job
        from rlhf_megatron.doctor.watch import Watch

        watch = Watch(timeout_seconds=timeout)
        channel.position = watch.position
        report = examine_job(
            context, config=config, needs=needs, full=not options.quick, watch=watch
        )
        if context.rank == 0:
            _print(report, as_json=options.json)
        return report.exit_code

    run_ranks(body, config=distributed)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"doctor: no-go on {socket.gethostname()}: the ranks have not come together")
    return EXIT_FAILED


def _print(report: Report, *, as_json: bool) -> None:
    print(report.as_json() if as_json else report.table(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
