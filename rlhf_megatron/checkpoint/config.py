"""Options of what a run keeps on disk."""

from dataclasses import dataclass

from rlhf_megatron.schema import number


@dataclass(kw_only=True)
class ExportConfig:
    """The model written at the end of a run."""

    final: bool = True
    """Write the trained actor to RUN/hf at the end, as a Hugging Face directory. Default true."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """Training checkpoints, RUN/checkpoints/step_000010: when they are written, which stay, and
    from which the run goes on. docs/checkpoints.md says what is in them."""

    interval_steps: int = number(0, minimum=0)
    """Write one after every so many steps. 0 (the default): by time alone."""

    interval_minutes: float = number(30.0, minimum=0)
    """Write one after the first step that ends so long after the last one was begun. 0: by steps
    alone. Default 30."""

    final: bool = True
    """Write one after the last step, from which a run with more run.steps can go on. Default true.
    One is written in any case where a run is stopped (SIGTERM, SIGUSR1, stop_before_minutes)."""

    keep_last: int = number(2, minimum=1)
    """How many of the newest stay; older ones are removed once a newer one is complete. Default 2,
    so that there is one more should the newest turn out to be damaged."""

    keep_every: int = number(0, minimum=0)
    """Checkpoints of steps that this divides stay for good. 0 (the default): none do."""

    asynchronous: bool = True
    """Copy the state to host memory, go on training, and write in the background (default). The
    copy stays allocated: per rank, its share of weights, master weights and moments. False: train
    on when the checkpoint is complete. What is written is the same."""

    resume: str = "auto"
    """auto (the default): go on from the current checkpoint of run.output_dir where there is one,
    else start from the beginning. never: start from the beginning. A path: that checkpoint
    (.../checkpoints/step_000010), of this run or another; the layouts may differ."""

    stop_before_minutes: float = number(0.0, minimum=0)
    """Under Slurm: stop so long before the job's time limit, with a checkpoint and exit code 3. It
    has to cover the rest of a step and the writing. 0 (the default): do not."""
