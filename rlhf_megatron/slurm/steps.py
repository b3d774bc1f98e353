"""The command lines of the job's steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_megatron.slurm.allocation import Allocation
from rlhf_megatron.slurm.container import Container

WAIT_SECONDS = 60
"""After the first task has ended, the others get so long. They leave by themselves within seconds
(distributed/failure.py); srun's own --kill-on-bad-exit would cut off those that are about to say
what went wrong, and turn their exit code into 137."""


def training_step(
    command: Sequence[str], *, allocation: Allocation, container: Container, logs: Path
) -> list[str]:
    """srun of one task per GPU, each with a log of its own."""
    options = [
        f"--nodes={len(allocation.nodes)}",
        f"--ntasks={allocation.num_tasks}",
        f"--ntasks-per-node={allocation.tasks_per_node}",
        "--distribution=block",  # ranks are numbered node by node
        "--kill-on-bad-exit=0",
        f"--wait={WAIT_SECONDS}",
        f"--output={logs}/task_%4t.txt",  # standard error goes there as well
        "--open-mode=append",
        *_common(allocation),
    ]
    return ["srun", *options, *container.srun_options(), *container.wrap(command)]


def check_step(
    command: Sequence[str], *, node: str, allocation: Allocation, container: Container, logs: Path
) -> list[str]:
    """srun of one task on one node."""
    options = [
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        f"--nodelist={node}",
        "--overlap",  # the checks of all nodes run side by side
        f"--output={logs}/check_{node}.txt",
        *_common(allocation),
    ]
    return ["srun", *options, *container.srun_options(), *container.wrap(command)]


def single_step(
    command: Sequence[str], *, allocation: Allocation, container: Container
) -> list[str]:
    """srun of one task, with its output on the job's own."""
    options = ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1", *_common(allocation)]
    return ["srun", *options, *container.srun_options(), *container.wrap(command)]


def _common(allocation: Allocation) -> list[str]:
    # Ranks meet through MASTER_ADDR; a cluster's default of PMIx could only fail.
    options = ["--mpi=none"]
    if allocation.cpus_per_task is not None:
        # Since Slurm 22.05 srun does not take it over from sbatch, and tasks would share one core.
        options.append(f"--cpus-per-task={allocation.cpus_per_task}")
    if allocation.has_gpus:
        # Each rank sees all GPUs of its node and takes the one of its local rank: with a task's
        # own GPU alone, NCCL could not use NVLink.
        options.append("--gpu-bind=none")
    return options
