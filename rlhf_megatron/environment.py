"""Which rank this process is, from what the launcher has set."""

import os

from rlhf_megatron.errors import ConfigError


def adopt_slurm_environment() -> None:
    """Under `srun` with one task per GPU: set torch's variables from Slurm's.

    Changes nothing where WORLD_SIZE is set (torchrun) or there is a single task. Raises ConfigError
    where MASTER_ADDR or MASTER_PORT is missing: without them each task would train by itself.
    """
    if "WORLD_SIZE" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) == 1:
        return
    if "SLURM_PROCID" not in os.environ or "SLURM_LOCALID" not in os.environ:
        return  # inside an allocation, but not started by srun
    missing = [
        f"{name}: not set, though srun has started {os.environ['SLURM_NTASKS']} tasks; export it "
        "in the batch script (the first node's name, and any free port)"
        for name in ("MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise ConfigError(missing)
    # "8(x4)" or "8(x2),4": tasks per node, equal on all nodes of a training job.
    tasks_per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get(
        "SLURM_TASKS_PER_NODE", os.environ["SLURM_NTASKS"]
    )
    os.environ.update(
        RANK=os.environ["SLURM_PROCID"],
        LOCAL_RANK=os.environ["SLURM_LOCALID"],
        WORLD_SIZE=os.environ["SLURM_NTASKS"],
        LOCAL_WORLD_SIZE=tasks_per_node.split("(")[0].split(",")[0],
    )
