"""Options of what a run shows and records."""

from dataclasses import dataclass

from rlhf_megatron.schema import choice, items, number


@dataclass(kw_only=True)
class WandbConfig:
    """Weights & Biases. A resumed run goes on in its W&B run, whose id is in the run's folder."""

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

    report: bool = True
    """Write RUN/report.html, the run in charts, when it is done. Default true. Needs the package
    plotly; without it the run's end says so in a line."""

    trace_steps: str = "1-20"
    """Steps that RUN/trace.json shows, a timeline of every rank's phases for ui.perfetto.dev, which
    the run writes as it ends or is stopped: "all", "" for none, or such as "1-20,500". Default
    1-20. No more than 200,000 events are written, whole steps from the first on; tools/trace.py
    writes any others from RUN/ledger.jsonl."""

    peak_tflops: float = number(0.0, minimum=0)
    """Dense peak rate of one device in the training precision, for train/mfu. 0 (default) takes
    the device's known rate; on a CPU it is measured by a matrix product at the start."""


@dataclass(kw_only=True)
class ProfileConfig:
    """Traces of what the CPU and the GPU did in single steps, by PyTorch's profiler."""

    steps: list[int] = items()
    """Steps that are traced, such as [3]. Empty (default): none. They take longer and need host
    memory; the first step of a run is not like the others."""

    ranks: list[int] = items(lambda: [0])
    """Ranks that write RUN/profile/step_N_rank_M.json.gz of them. Default [0]."""


def refused_profile(config: ProfileConfig, *, world_size: int) -> list[str]:
    """Problems of `profile`."""
    problems = []
    if any(step < 1 for step in config.steps):
        problems.append(f"profile.steps={config.steps}: steps count from 1")
    if any(not 0 <= rank < world_size for rank in config.ranks):
        problems.append(
            f"profile.ranks={config.ranks}: this run has the ranks 0 to {world_size - 1}"
        )
    return problems


def parse_steps(text: str) -> list[range] | None:
    """ "1-20,500" -> [range(1, 21), range(500, 501)]; "all" -> None; "" -> []. Ascending.

    Raises ValueError on anything else.
    """
    if text.strip() == "all":
        return None
    found: list[range] = []
    for part in text.split(",") if text.strip() else ():
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"{part.strip()!r} is neither a step nor a range such as 1-20")
        steps = range(int(first), int(last or first) + 1)
        if not steps or (found and steps.start < found[-1].stop):
            raise ValueError(f"{text!r} is not ascending")
        found.append(steps)
    return found


def refused_trace_steps(config: LoggingConfig) -> list[str]:
    """Problems of `logging.trace_steps`."""
    try:
        parse_steps(config.trace_steps)
    except ValueError as error:
        return [f'logging.trace_steps={config.trace_steps}: {error}; give "all", "" or 1-20,500']
    return []
