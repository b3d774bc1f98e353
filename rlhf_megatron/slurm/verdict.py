"""Whether a job that has ended goes back into the queue."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_STOPPED_RESUMABLE

SAME_COMMAND = "the same sbatch command goes on from the last checkpoint"


@dataclass(frozen=True)
class Ending:
    """How one start of a job has ended."""

    exit_code: int
    """srun's: the largest of the tasks', 128 + N for a task that signal N has ended."""
    asked_to_yield: bool
    """Whether Slurm (or a person) has sent the batch script SIGUSR1: the time limit is near."""
    cancelled: bool
    """Whether the job was ended from outside, by scancel."""
    fruitless: int
    """How many starts in a row, this one included, have brought no new checkpoint."""
    restarts: int
    """How often the job was put back before."""
    bad_nodes: tuple[str, ...] = ()
    """Those that have not passed the check; the training was not started then."""


@dataclass(frozen=True)
class Limits:
    """Where a job gives up."""

    fruitless: int
    """So many starts in a row without a new checkpoint."""
    restarts: int
    """So many returns to the queue, whatever for."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of the job."""

    requeue: bool
    reason: str
    """For a person: what happened, and what to do where the job is not put back."""


def judge(ending: Ending, *, limits: Limits) -> Verdict:
    """The rules of docs/slurm.md, in their order."""
    code = ending.exit_code
    if code == EXIT_DONE:
        return Verdict(False, "done")
    if ending.cancelled:
        return Verdict(False, f"cancelled; {SAME_COMMAND}")
    if code == EXIT_BAD_INPUT:
        return Verdict(
            False, "exit code 2, bad configuration or input: another start would not help; mend it"
        )
    if code == EXIT_STOPPED_RESUMABLE and not ending.asked_to_yield:
        return Verdict(False, f"stopped by hand, the state is saved; {SAME_COMMAND}")
    what = _what(ending)
    if ending.fruitless >= limits.fruitless:
        return Verdict(
            False,
            f"{what}; that was start {ending.fruitless} in a row without a new checkpoint, and "
            f"MAX_ATTEMPTS={limits.fruitless}: given up. {_advice(ending)}; then {SAME_COMMAND}",
        )
    if ending.restarts >= limits.restarts:
        return Verdict(
            False,
            f"{what}; the job was put back {ending.restarts} times, and MAX_RESTARTS="
            f"{limits.restarts}: given up; {SAME_COMMAND}",
        )
    return Verdict(True, what)


def _what(ending: Ending) -> str:
    if ending.bad_nodes:
        return f"{', '.join(ending.bad_nodes)} did not pass the check"
    if ending.exit_code == EXIT_STOPPED_RESUMABLE:
        return "stopped before the time limit, the state is saved"
    if ending.asked_to_yield:
        return f"the time limit came before the state was saved (exit code {ending.exit_code})"
    return f"failed with exit code {ending.exit_code}"


def _advice(ending: Ending) -> str:
    if ending.bad_nodes:
        return "Look at the nodes' reports"
    if ending.asked_to_yield:
        return (
            "Between two checkpoints lies more than a time limit: give more --time, or more "
            "seconds in --signal=B:USR1@SECONDS for the rest of a step and a save"
        )
    return "Look at the first error above"
