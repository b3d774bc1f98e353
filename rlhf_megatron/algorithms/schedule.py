"""Learning-rate schedules."""

import math


def learning_rate(
    step: int,
    *,
    peak: float,
    minimum: float,
    schedule: str,
    warmup_steps: int,
    total_steps: int,
) -> float:
    """The rate of the step that follows `step` completed ones, of `total_steps` in the run.

    Step k of n warm-up steps takes (k + 1) / (n + 1) of the peak. After them: "constant" keeps the
    peak; "linear" and "cosine" fall from the peak at step n to `minimum` at step total_steps - 1,
    and stay there. A run with no step beyond the first after the warm-up never falls.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    fall_steps = total_steps - 1 - warmup_steps
    if schedule == "constant" or fall_steps <= 0:
        return peak
    progress = min((step - warmup_steps) / fall_steps, 1.0)
    if schedule == "linear":
        share = 1.0 - progress
    elif schedule == "cosine":
        share = (1.0 + math.cos(math.pi * progress)) / 2
    else:
        raise AssertionError(f"unknown schedule {schedule}")
    return minimum + (peak - minimum) * share
