"""What a batch job is going to do, from its command line and what Slurm has given it."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rlhf_megatron.errors import ConfigError, UserError
from rlhf_megatron.slurm.allocation import Allocation, read_allocation
from rlhf_megatron.slurm.container import Container, choose_container, not_mounted
from rlhf_megatron.slurm.verdict import Limits

DOCTOR = "doctor"
"""Value of --node-check: the package's own check, `rlhf-megatron doctor --node-only`."""


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


def parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    """The command line of launch/slurm_job.py, which the batch scripts call with their defaults and
    then what follows their own name. Most options can come from the environment as well."""
    found = _Parser(description="The batch step of a Slurm job: check the nodes, train, requeue.")

    def add(
        name: str, *, help: str, kind: Callable[[str], object] = str, default: str = ""
    ) -> None:
        variable = name.upper().replace("-", "_")
        value = environment.get(variable, default)
        found.add_argument(f"--{name}", type=kind, default=value, help=f"{help} [{variable}]")

    found.add_argument(
        "--config",
        action="append",
        required=True,
        metavar="FILE",
        help="given several times, later files override earlier ones",
    )
    found.add_argument(
        "--output-dir",
        required=True,
        metavar="DIR",
        help="run.output_dir, where that is not given; seed_N below it in an array",
    )
    found.add_argument("--prepare", default="", metavar="COMMAND", help="one task runs it first")
    add("python", help="of the tasks; default: .venv of the checkout, else python3 on PATH")
    add("container-image", help="a .sif file (apptainer), or an image for pyxis")
    add("container-mounts", help="PATH or HOST:CONTAINER, comma-separated")
    add("node-check", help=f"command per node; {DOCTOR}: ours; empty: none", default=DOCTOR)
    add("check-seconds", help="a node that takes longer is not fit", kind=float, default="600")
    add("bad-nodes", help="a list of nodes; default: OUTPUT_DIR/slurm/bad_nodes.txt")
    add("max-attempts", help="starts in a row without a new checkpoint", kind=int, default="3")
    add("max-restarts", help="returns to the queue in all", kind=int, default="200")
    found.add_argument("overrides", nargs="*", metavar="key.path=value")
    return found


def make_plan(
    arguments: Sequence[str], *, environment: Mapping[str, str], repository: Path
) -> JobPlan:
    """Raises UserError with all that is wrong at once. Writes nothing."""
    options = parser(environment).parse_intermixed_args(arguments)
    python = options.python or _default_python(options, repository=repository)
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
    if not options.container_image and shutil.which(python) is None:
        problems.append(
            f"PYTHON={python}: no such program on {allocation.nodes[0]}; give the python "
            "of the environment that rlhf-megatron is installed in, or CONTAINER_IMAGE"
        )
    if problems:
        raise ConfigError(problems)
    settings = _settings(options, run=run, array_task=allocation.array_task)
    return JobPlan(
        allocation=allocation,
        container=container,
        run=run,
        prepare=tuple(_command(options.prepare, python=python)),
        train=(python, "launch/train.py", *settings),
        check=tuple(
            _check_command(
                options.node_check, python=python, settings=settings, tasks=allocation.num_tasks
            )
        ),
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
            "checkpoint.resume=never: a job that is put back into the queue would begin anew; "
            "leave it out, and give another run.output_dir to start over"
        )
    if _value(overrides, key="checkpoint.stop_before_minutes").strip("0.") != "":
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


def _settings(options: argparse.Namespace, *, run: Path, array_task: int | None) -> list[str]:
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


def _default_python(options: argparse.Namespace, *, repository: Path) -> str:
    """What `make venv` has made; in a container, or without it, the first one on PATH."""
    own = repository / ".venv" / "bin" / "python"
    return str(own) if own.exists() and not options.container_image else "python3"


def _check_command(text: str, *, python: str, settings: list[str], tasks: int) -> list[str]:
    if text != DOCTOR:
        return _command(text, python=python)
    return [python, "tools/doctor.py", "--node-only", f"--world-size={tasks}", *settings]


def _command(text: str, *, python: str) -> list[str]:
    """Words of a command line, in which {python} is the tasks' own."""
    return [word.replace("{python}", python) for word in shlex.split(text)]


def _value(overrides: Sequence[str], *, key: str) -> str:
    """Of the last override of a key; "" where there is none."""
    return next((o[len(key) + 1 :] for o in reversed(overrides) if o.startswith(f"{key}=")), "")
