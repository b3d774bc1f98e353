"""Options of what a run shows and records."""

from dataclasses import dataclass

from rlhf_megatron.schema import choice, items, number


@dataclass(kw_only=True)
class WandbConfig:
    """Weights & Biases."""

    mode: str = choice("off", "offline", "online")
    """off (default), offline (files in the run folder) or online."""

    project: str = "rlhf-megatron"
    """Project name."""

    name: str = ""
    """Run name; empty (default) takes run.name."""


@dataclass(kw_only=True)
class LoggingConfig:
    """Console, files and trackers. All of it happens on rank 0, but for the rank logs."""

    wandb: WandbConfig = items(WandbConfig)
    """Weights & Biases."""

    tensorboard: bool = False
    """Write TensorBoard events to RUN/tensorboard. Default false."""

    sample_responses: int = number(2, minimum=0)
    """Responses printed after each step. Default 2."""

    rollouts_interval_steps: int = number(1, minimum=0)
    """Write RUN/rollouts/step_N.jsonl every so many steps; 0 never. Default 1."""

    monitor_interval_steps: int = number(10, minimum=0)
    """Print and log a line with the memory in use every so many steps; 0 never. Default 10."""

    memory_snapshot_on_oom: bool = False
    """On a GPU record allocations with their stacks, and write RUN/oom_rank_N.pickle for PyTorch's
    memory viewer where memory runs out. Costs some speed. Default false."""

    peak_tflops: float = number(0.0, minimum=0)
    """Dense peak rate of one device in the training precision, for train/mfu. 0 (default) takes
    the device's known rate; on a CPU it is measured by a matrix product at the start."""
