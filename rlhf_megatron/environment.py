"""Which rank this process is, from what the launcher has set."""

import os

from rlhf_megatron.errors import ConfigError
from rlhf_megatron.slurm.hosts import expand_hostlist, master_port, tasks_per_node


def adopt_slurm_environment() -> None:
    """Under `srun` with one task per GPU: set torch's variables from Slurm's.

    RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; MASTER_ADDR and MASTER_PORT where the batch
    script has not set them: the first node of the step, and a port that follows from the job.
    Changes nothing where WORLD_SIZE is set (torchrun) or there is a single task. Raises ConfigError
    where the tasks are not spread evenly over the nodes, node by node.
    """
    environment = os.environ
    if "WORLD_SIZE" in environment or int(environment.get("SLURM_NTASKS", "1")) == 1:
        return
    if "SLURM_PROCID" not in environment or "SLURM_LOCALID" not in environment:
        return  # inside an allocation, but not started by srun
    per_node = tasks_per_node(
        environment.get("SLURM_STEP_TASKS_PER_NODE")
        or environment.get("SLURM_TASKS_PER_NODE", environment["SLURM_NTASKS"])
    )
    problems = _uneven(per_node)
    if "MASTER_ADDR" not in environment:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        if not nodes:
            problems.append(
                "MASTER_ADDR: not set, and SLURM_JOB_NODELIST neither; export it in the batch "
                "script (the first node's name)"
            )
        else:
            environment["MASTER_ADDR"] = expand_hostlist(nodes)[0]
    if "MASTER_PORT" not in environment:
        environment["MASTER_PORT"] = str(
            master_port(
                int(environment.get("SLURM_JOB_ID", "0")),
                restarts=int(environment.get("SLURM_RESTART_COUNT", "0") or 0),
            )
        )
    if problems:
        raise ConfigError(problems)
    environment.update(
        RANK=environment["SLURM_PROCID"],
        LOCAL_RANK=environment["SLURM_LOCALID"],
        WORLD_SIZE=environment["SLURM_NTASKS"],
        LOCAL_WORLD_SIZE=str(per_node[0]),
    )


def _uneven(per_node: list[int]) -> list[str]:
    """Ranks are numbered node by node, with equally many on each: layouts count on it."""
    if len(set(per_node)) > 1:
        return [
            f"SLURM_TASKS_PER_NODE={','.join(map(str, per_node))}: must be the same on all nodes; "
            "give sbatch --nodes and --ntasks-per-node, and leave --ntasks out"
        ]
    rank, local_rank = (int(os.environ[f"SLURM_{name}ID"]) for name in ("PROC", "LOCAL"))
    node = int(os.environ.get("SLURM_NODEID", rank // per_node[0]))
    if rank != node * per_node[0] + local_rank:
        return [
            f"SLURM_PROCID={rank}: is task {local_rank} of node {node}, and tasks must be numbered "
            "node by node; start them with srun --distribution=block"
        ]
    return []
