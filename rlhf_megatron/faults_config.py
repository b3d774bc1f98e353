"""Options of what a run does about bad steps and hangs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.schema import choice, items, number

SETUP = "setup"
PHASES = (
    "warmup",
    "rollout",
    "reward",
    "sleep",
    "log_prob",
    "ref_log_prob",
    "value",
    "advantage",
    "update_critic",
    "update_actor",
    "reshard",
    "checkpoint",
    "evaluation_rollout",
    "evaluation_reward",
    "exchange",
    "evaluation_exchange",
)
"""In the order of a step; what comes before the first of them is the setup. `exchange`: where roles
have ranks of their own, they tell each other what they found, and wait for the slowest."""


@dataclass(kw_only=True)
class FaultsConfig:
    """What a run does about updates that would spoil it, and about ranks that hang. docs/faults.md
    lists what is found, by symptom."""

    bad_step: str = choice("stop", "skip")
    """What is done about an update whose loss or gradient is not finite or whose gradient norm is
    far outside its history, and about log-probs or values that are not finite: stop (default) ends
    the run with exit code 1; skip leaves weights and optimizer as they are, counts it in
    faults/skipped_updates, and goes on. Weights that are not finite always end the run."""

    max_bad_steps_in_row: int = number(3, minimum=1)
    """With bad_step=skip: the run ends when so many PPO steps in a row had an update skipped.
    Default 3."""

    grad_norm_factor: float = number(0.0, minimum=0)
    """An update is bad where its gradient norm, before clipping, is more than so many times the
    median of the role's last ones. 0 (default): any finite norm is good. 10 to 100 finds spikes;
    the first 10 updates are taken as they come. Costs one more small all-reduce per update."""

    grad_norm_window_updates: int = number(100, minimum=1)
    """Updates of a role whose norms the median is taken of. Default 100."""

    keep_bad_batches: int = number(10, minimum=0)
    """The newest batches of bad updates that stay in RUN/bad_batches for a look. 0: none is saved.
    Default 10."""

    check_weights: bool = True
    """Look through actor and critic for NaN and infinity after each step's updates, before the
    weights reach the engines or a checkpoint. One pass over them in memory. Default true."""

    phase_limit_seconds: float = number(1800.0, minimum=0)
    """A rank that stays in one phase of a step for longer, or between two of them, ends the job
    with a message that names it. Keep it below distributed.timeout_seconds, so that a collective's
    timeout does not come first. 0: no limits. Default 1800."""

    phase_limits: dict[str, Any] = items(dict)
    """Limits of single phases in seconds, such as {rollout: 3600, checkpoint: 600}; 0 is none. At
    most distributed.timeout_seconds, for other ranks may wait for that phase in a collective.
    Names are those of time/<phase>_seconds, and setup, which has no limit of its own accord; nor
    has exchange, where ranks wait for others, which have theirs.
    An evaluation's phases take those of rollout and reward unless they have their own."""


def refused_phase_limits(limits: Mapping[str, Any], *, timeout_seconds: float) -> list[str]:
    """Problems of `faults.phase_limits`. timeout_seconds: distributed.timeout_seconds."""
    problems = []
    known = (SETUP, *PHASES)
    for name, value in limits.items():
        at = f"faults.phase_limits.{name}"
        if name not in known:
            problems.append(f"{at}: no such phase; give one of {', '.join(known)}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            problems.append(f"{at}={value}: must be a number of seconds, 0 for no limit")
        elif not math.isfinite(value) or value < 0:
            problems.append(f"{at}={value}: must be finite and at least 0 (no limit)")
        elif value > timeout_seconds and name != SETUP:
            problems.append(
                f"{at}={value}: above distributed.timeout_seconds={timeout_seconds:g}, after which "
                "the ranks that wait for this phase end the job; raise that as well"
            )
    return problems


@dataclass(frozen=True)
class Limit:
    """How long a rank may stay where it is, and by which key."""

    seconds: float
    """0: as long as it likes."""
    key: str


def phase_limit(faults: FaultsConfig, *, phase: str, rollout_timeout_seconds: float = 0.0) -> Limit:
    """The limit of `phase`; of SETUP; or with "" of the time between two phases.

    rollout_timeout_seconds (rollout.timeout_seconds), where it is set, is that of the rollouts.
    """
    names = [phase]
    if phase.startswith("evaluation_"):
        names.append(phase.removeprefix("evaluation_"))
    for name in names:
        if name in faults.phase_limits:
            return Limit(float(faults.phase_limits[name]), f"faults.phase_limits.{name}")
    if "rollout" in names and rollout_timeout_seconds > 0:
        return Limit(rollout_timeout_seconds, "rollout.timeout_seconds")
    if phase == SETUP or "exchange" in names:
        return Limit(0.0, f"faults.phase_limits.{names[-1]}")
    return Limit(faults.phase_limit_seconds, "faults.phase_limit_seconds")
