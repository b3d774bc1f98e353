"""What a batch job is going to do, from its command line and what Slurm has given it."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rlhf_megatron.errors import ConfigError, UserError
from rlhf_megatron.slurm.allocation import Allocation, read_allocation
from rlhf_megatron.slurm.container import Container, choose_container, not_mounted
from rlhf_megatron.slurm.verdict import Limits

DOCTOR = "doctor"
"""Value of --node-check: the package's own check."""


@dataclass(frozen=True)
class JobPlan:
    """One start of a job, ready to run."""

    allocation: Allocation
    container: Container
    run: Path
    """The run's folder: with an array, of this element's seed."""
    prepare: tuple[str, ...]
    """A command that one task runs first; empty for none."""
    train: tuple[str, ...]
    """The command of each task."""
    check: tuple[str, ...]
    """The command that checks a node; empty for none."""
    check_seconds: float
    bad_nodes: Path
    limits: Limits

    @property
    def logs(self) -> Path:
        """What the tasks of this start print."""
        return self.run / "logs" / f"job_{self.allocation.job}.{self.allocation.restarts}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see the top of the batch script")


def parser() -> argparse.ArgumentParser:
    """The command line of launch/slurm_job.py, which the batch scripts call."""
    found = _Parser(description="The batch step of a Slurm job: check, train, requeue.")
    add = found.add_argument
    add("--config", action="append", required=True, metavar="FILE")
    add("--output-dir", required=True, metavar="DIR", help="run.output_dir; seed_N below it in arrays")
    add("--python", default="python3", help="of the tasks: a path or a name on their PATH")
    add("--container-image", default="", help="a .sif file (apptainer) or an image for pyxis")
    add("--container-mounts", default="", help="PATH or HOST:CONTAINER, comma-separated")
    add("--node-check", default="", help=f"command per node, or {DOCTOR}; empty: none")
    add("--check-seconds", type=float, default=600.0, help="a node that takes longer is bad")
    add("--bad-nodes", default="", metavar="FILE", help="default: OUTPUT_DIR/slurm/bad_nodes.txt")
    add("--prepare", default="", metavar="COMMAND", help="run once, before the training")
    add("--max-attempts", type=int, default=3, help="starts in a row without a new checkpoint")
    add("--max-restarts", type=int, default=200, help="returns to the queue in all")
    add("overrides", nargs="*", metavar="key.path=value")
    return found


def make_plan(
    arguments: Sequence[str], *, environment: Mapping[str, str], repository: Path
) -> JobPlan:
    """Raises UserError with all that is wrong at once. Writes nothing."""
    options = parser().parse_intermixed_args(arguments)
    allocation = read_allocation(environment)
    problems = _refused(options.overrides, is_array=allocation.array_task is not None)
    problems += [
        f"--config {path}: no such file (relative paths start at {repository})"
        for path in options.config
        if not (repository / path).is_file()
    ]
    base = repository / (_value(options.overrides, key="run.output_dir") or options.output_dir)
    run = base if allocation.array_task is None else base / f"seed_{allocation.array_task}"
    container = Container()
    try:
        container = choose_container(
            options.container_image,
            mounts=options.container_mounts,
            seen=(repository, base),
            workdir=repository,
            gpus=allocation.has_gpus,
        )
        problems += not_mounted(container, overrides=options.overrides)
    except UserError as error:
        problems.append(str(error))
    if not options.container_image and shutil.which(options.python) is None:
        problems.append(
            f"PYTHON={options.python}: no such program on {allocation.nodes[0]}; give the python "
            "of the environment that rlhf-megatron is installed in, or CONTAINER_IMAGE"
        )
    if problems:
        raise ConfigError(problems)
    settings = _settings(options, run=run, array_task=allocation.array_task)
    return JobPlan(
        allocation=allocation,
        container=container,
        run=run,
        prepare=tuple(_command(options.prepare, python=options.python)),
        train=(options.python, "launch/train.py", *settings),
        check=tuple(_check_command(options, settings=settings)),
        check_seconds=options.check_seconds,
        bad_nodes=Path(options.bad_nodes or base / "slurm" / "bad_nodes.txt"),
        limits=Limits(options.max_attempts, options.max_restarts),
    )


def _refused(overrides: Sequence[str], *, is_array: bool) -> list[str]:
    problems = []
    if "$" in _value(overrides, key="run.output_dir"):
        problems.append(
            f"run.output_dir={_value(overrides, key='run.output_dir')}: the batch script has to "
            "know the folder; give it spelt out"
        )
    if _value(overrides, key="checkpoint.resume") == "never":
        problems.append(
            "checkpoint.resume=never: a job that is put back into the queue would begin anew; leave "
            "it out, and give another OUTPUT_DIR to start over"
        )
    if float(_value(overrides, key="checkpoint.stop_before_minutes") or 0) != 0:
        problems.append(
            "checkpoint.stop_before_minutes: here Slurm's signal stops the run; leave it out, and "
            "give sbatch --signal=B:USR1@SECONDS"
        )
    if is_array and _value(overrides, key="run.seed"):
        problems.append(
            f"run.seed={_value(overrides, key='run.seed')}: each element of an array trains with "
            "its own number as seed; leave it out"
        )
    return problems


def _settings(
    options: argparse.Namespace, *, run: Path, array_task: int | None
) -> list[str]:
    """The trainer's arguments."""
    ours = {
        "run.output_dir": str(run),
        "checkpoint.resume": "auto",
        # Slurm's signal does this, and tells the batch script as well.
        "checkpoint.stop_before_minutes": "0",
    }
    if array_task is not None:
        ours["run.seed"] = str(array_task)
    theirs = [o for o in options.overrides if not o.startswith("run.output_dir=")]
    configs = [word for path in options.config for word in ("--config", path)]
    return [*configs, *(f"{key}={value}" for key, value in ours.items()), *theirs]


def _check_command(options: argparse.Namespace, *, settings: list[str]) -> list[str]:
    if options.node_check != DOCTOR:
        return _command(options.node_check, python=options.python)
    return [options.python, "-m", "rlhf_megatron.cli", DOCTOR, "--node-only", *settings]


def _command(text: str, *, python: str) -> list[str]:
    """Words of a command line, in which {python} is the tasks' own."""
    return [word.replace("{python}", python) for word in shlex.split(text)]


def _value(overrides: Sequence[str], *, key: str) -> str:
    """Of the last override of a key; "" where there is none."""
    return next((o[len(key) + 1 :] for o in reversed(overrides) if o.startswith(f"{key}=")), "")
