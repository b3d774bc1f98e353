"""What a step of a configuration would take, phase by phase, and the best placement of its roles.

    python tools/simulate.py --config configs/ppo_70b_64gpu.yaml --world-size 64
    python tools/simulate.py --config FILE --world-size 256 --search critic.model=DIR
    python tools/simulate.py --config FILE --world-size 4 --calibrate RUN_DIR \\
        --cluster configs/clusters/cpu_2_cores.yaml --save-cluster calibrated.yaml

Rates are those of the cluster's description: assumed, unless --calibrate fits them to a run. Needs
no GPU, no peers and no weights. docs/simulator.md says what is counted.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.architectures import REPOSITORY_CONFIGS, read_architectures, stand_in_folders
from rlhf_megatron.config import Config, read_config
from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE, ConfigError, UserError
from rlhf_megatron.memory.plan import RoleModels
from rlhf_megatron.memory_report import role_models
from rlhf_megatron.simulator.cluster import Cluster

DEFAULT_CLUSTER = REPOSITORY_CONFIGS / "clusters" / "h100_80gb.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    try:
        _check(options)
        _run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except OSError as error:
        print(f"error: the rates cannot be written ({error})", file=sys.stderr)
        return EXIT_BAD_INPUT
    return EXIT_DONE


def _run(options: argparse.Namespace) -> None:
    from rlhf_megatron.simulator import report
    from rlhf_megatron.simulator.cluster import read_cluster, write_cluster
    from rlhf_megatron.simulator.search import search
    from rlhf_megatron.simulator.setup import make_setup, workload_of
    from rlhf_megatron.simulator.steps import simulate

    cluster = read_cluster(options.cluster)
    notes: list[str] = []
    if options.calibrate:
        cluster, text = _calibrated(options, cluster=cluster)
        notes += [text, ""]
        if options.save_cluster:
            write_cluster(cluster, path=options.save_cluster)
    config, models, found_notes = _read(options.config, overrides=options.overrides)
    notes += found_notes
    workload = workload_of(
        config, prompt_tokens=options.prompt_tokens, response_tokens=options.response_tokens
    )
    if options.search:
        found = search(
            config, models=models, cluster=cluster, world_size=options.world_size, workload=workload
        )
        if options.json:
            result = report.search_figures(found, config=config, world_size=options.world_size)
        else:
            text = report.describe_search(found, config=config, world_size=options.world_size)
    else:
        setup = make_setup(
            config, models=models, cluster=cluster, world_size=options.world_size, workload=workload
        )
        simulation = simulate(setup)
        if options.json:
            result = report.figures(simulation)
        else:
            text = report.describe(simulation)
    print(json.dumps(result) if options.json else "\n".join([*notes, text]))


def _calibrated(options: argparse.Namespace, *, cluster: Cluster) -> tuple[Cluster, str]:
    """The cluster with the rates of a run, and how well they fit."""
    from rlhf_megatron.simulator.calibrate import calibrate
    from rlhf_megatron.simulator.measured import read_run
    from rlhf_megatron.simulator.report import describe_calibration
    from rlhf_megatron.simulator.setup import make_setup

    run = read_run(options.calibrate)
    config, models, _ = _read([str(options.calibrate / "config.yaml")], overrides=())
    setup = make_setup(
        config, models=models, cluster=cluster, world_size=run.world_size, workload=run.workload
    )
    found = calibrate(setup, run=run)
    return found.cluster, describe_calibration(found)


def _read(
    files: Sequence[str], *, overrides: Sequence[str]
) -> tuple[Config, RoleModels, tuple[str, ...]]:
    """A configuration as far as its layouts go; paths of data and output need not be there."""
    loaded = read_config(files, overrides=overrides)
    if loaded.problems:
        raise ConfigError([loaded.secrets.hide(problem) for problem in loaded.problems])
    architectures = read_architectures(loaded.config, stand_ins=stand_in_folders(files))
    return (
        loaded.config,
        role_models(loaded.config, architectures=architectures),
        architectures.notes,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Say what a step would take, and which placement is the fastest."
    )
    parser.add_argument(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="YAML file; given several times, later files override earlier ones",
    )
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="GPUs")
    parser.add_argument(
        "--cluster",
        type=Path,
        default=DEFAULT_CLUSTER,
        metavar="FILE",
        help="description of the machine (default: configs/clusters/h100_80gb.yaml)",
    )
    parser.add_argument(
        "--calibrate", type=Path, metavar="RUN_DIR", help="fit the rates to this run first"
    )
    parser.add_argument(
        "--save-cluster", type=Path, metavar="FILE", help="write the fitted rates there"
    )
    parser.add_argument(
        "--search", action="store_true", help="try placements, and show the best with its reasons"
    )
    for name, of in (("prompt", "rollout.max_prompt"), ("response", "rollout.max_response")):
        parser.add_argument(
            f"--{name}-tokens",
            type=float,
            default=0.0,
            metavar="N",
            help=f"mean of a sample (default: half of {of}_tokens)",
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="override keys of the configuration"
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    problems = [
        f"{name} {value}: must be {rule}"
        for name, value, is_right, rule in (
            ("--world-size", options.world_size, options.world_size > 0, "1 or more"),
            ("--prompt-tokens", options.prompt_tokens, options.prompt_tokens >= 0, "0 or more"),
            (
                "--response-tokens",
                options.response_tokens,
                options.response_tokens >= 0,
                "0 (half of the greatest length) or more",
            ),
        )
        if not is_right
    ]
    if options.save_cluster and not options.calibrate:
        problems.append("--save-cluster: needs --calibrate RUN_DIR, which gives the rates to save")
    if problems:
        raise ConfigError(problems)


if __name__ == "__main__":
    sys.exit(main())
