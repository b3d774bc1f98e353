"""What Slurm has given to this job, as its batch script sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_megatron.errors import UserError
from rlhf_megatron.slurm.hosts import expand_hostlist, master_port, tasks_per_node


@dataclass(frozen=True)
class Allocation:
    """One start of a job."""

    job: str
    """As scontrol wants it: `123`, or `120_3` for an element of an array. The number of an array's
    last element is that of the whole array: scontrol would requeue all of them."""
    job_id: int
    array_task: int | None
    restarts: int
    """How often Slurm has put this job back into the queue before."""
    nodes: tuple[str, ...]
    tasks_per_node: int
    cpus_per_task: int | None
    has_gpus: bool

    @property
    def num_tasks(self) -> int:
        """Of the training: the world size."""
        return len(self.nodes) * self.tasks_per_node

    @property
    def port(self) -> int:
        return master_port(self.job_id, restarts=self.restarts)


def read_allocation(environment: Mapping[str, str]) -> Allocation:
    """Raises UserError outside of a job, and where its nodes get different numbers of tasks."""
    if "SLURM_JOB_ID" not in environment:
        raise UserError(
            "SLURM_JOB_ID: not set, so this is no Slurm job; submit it: sbatch slurm/NAME.sh"
        )
    per_node = tasks_per_node(environment.get("SLURM_TASKS_PER_NODE", "1"))
    if len(set(per_node)) > 1:
        raise UserError(
            f"SLURM_TASKS_PER_NODE={environment['SLURM_TASKS_PER_NODE']}: must be the same on all "
            "nodes; give sbatch --nodes and --ntasks-per-node, and leave --ntasks out"
        )
    job = environment["SLURM_JOB_ID"]
    array_task = environment.get("SLURM_ARRAY_TASK_ID")
    cpus = environment.get("SLURM_CPUS_PER_TASK")
    return Allocation(
        job=job if array_task is None else f"{environment['SLURM_ARRAY_JOB_ID']}_{array_task}",
        job_id=int(job),
        array_task=None if array_task is None else int(array_task),
        restarts=int(environment.get("SLURM_RESTART_COUNT", "0") or 0),
        nodes=tuple(expand_hostlist(environment["SLURM_JOB_NODELIST"])),
        tasks_per_node=per_node[0],
        cpus_per_task=None if cpus is None else int(cpus),
        has_gpus=any(
            environment.get(name)
            for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_JOB_GPUS")
        ),
    )
