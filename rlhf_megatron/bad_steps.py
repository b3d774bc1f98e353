"""Bad steps: updates that would spoil the weights, found before the optimizer has taken them.

Everything is judged by figures that are the same on all ranks, so that all decide alike.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.batch import RaggedBatch, save_batch
from rlhf_megatron.data.exchange import gather_lists
from rlhf_megatron.engine.model_engine import ModelEngine, StepResult
from rlhf_megatron.errors import JobError
from rlhf_megatron.faults_config import FaultsConfig
from rlhf_megatron.ppo import Update

logger = logging.getLogger(__name__)

FOLDER = "bad_batches"
LEAST_HISTORY_UPDATES = 10
"""Norms that a role needs before one can be far outside them; fewer where the window is smaller."""
SHOWN_PARAMETERS = 3
WAY_OUT = "Look at the step's rewards and lengths; lower the learning rate or the gradient clip"


class BadSteps:
    """Judges each update of a run, and counts. An UpdateGuard (ppo.py). A Stateful part of the run:
    what is judged depends on the norms so far."""

    def __init__(
        self,
        config: FaultsConfig,
        *,
        output_dir: Path,
        rank: int,
        group: dist.ProcessGroup | None,
        say: Callable[[str], None],
        check_weights: Callable[[str], None] = lambda when: None,
    ) -> None:
        """`group`: the job's, None in a single process. `check_weights`: raises JobError on all
        ranks where the cause lies in weights that are not finite; its argument says when."""
        self._check_weights = check_weights
        self._config, self._folder = config, output_dir / FOLDER
        self._rank, self._group, self._say = rank, group, say
        self._norms: dict[str, deque[float]] = {}
        self._step = self._skipped_updates = 0
        self._is_bad = False
        self._last_reason = ""
        self.bad_steps = self.bad_in_row = 0

    @property
    def wants_norm(self) -> bool:
        """Whether the gradient norm has to be known before the update."""
        return self._config.grad_norm_factor > 0

    def step_begins(self, step: int) -> None:
        self._step, self._skipped_updates, self._is_bad = step, 0, False

    def takes(self, result: StepResult, *, update: Update) -> bool:
        """Whether the update may happen. Raises JobError on all ranks where it must end the run."""
        reason = _reason_not_finite(result)
        if reason:
            self._check_weights(f"in update_{update.role} of step {self._step}")
        reason = reason or self._reason_outlier(result, role=update.role)
        if not reason:
            if self.wants_norm:
                self._history(update.role).append(result.grad_norm)
            return True
        self._skipped_updates += 1
        where = f"update {update.number} of {update.count}"
        place = f"update_{update.role}_{update.number:03d}"
        suspects = describe_nonfinite(update.batch)
        reason += f" (its batch holds {suspects})" if suspects else ""
        self._found(f"{where}: {reason}", phase=f"update_{update.role}", place=place, update=update)
        return False

    def accepts(self, batch: RaggedBatch, *, last_values: Tensor) -> bool:
        """Whether the step's log-probs and values are finite; without that no update makes sense.
        Raises JobError on all ranks where they must end the run."""
        wrong = describe_nonfinite(batch)
        if not bool(torch.isfinite(last_values).all()):
            wrong = f"{wrong}, " * bool(wrong) + "values after the last token"
        if not wrong:
            return True
        self._check_weights(f"in step {self._step}, before its updates")
        update = Update(role="step", number=0, count=0, batch=batch)
        reason = f"the batch holds {wrong}, though the weights are finite"
        self._found(reason, phase="value", place="outputs", update=update)
        return False

    def step_ends(self) -> dict[str, float]:
        """The step's metrics. Raises JobError on all ranks after too many bad steps in a row."""
        self.bad_steps += self._is_bad
        self.bad_in_row = self.bad_in_row + 1 if self._is_bad else 0
        limit = self._config.max_bad_steps_in_row
        if self.bad_in_row >= limit:
            raise JobError(
                f"bad steps in a row: {limit}, up to step {self._step} "
                f"(faults.max_bad_steps_in_row={limit}); the last: {self._last_reason}. {WAY_OUT}"
            )
        return {
            "faults/bad_steps": float(self.bad_steps),
            "faults/skipped_updates": float(self._skipped_updates),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "bad_steps": self.bad_steps,
            "bad_in_row": self.bad_in_row,
            "grad_norms": {role: list(norms) for role, norms in self._norms.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bad_steps, self.bad_in_row = state["bad_steps"], state["bad_in_row"]
        for role, norms in state["grad_norms"].items():
            self._history(role).extend(norms)

    def _history(self, role: str) -> deque[float]:
        return self._norms.setdefault(role, deque(maxlen=self._config.grad_norm_window_updates))

    def _reason_outlier(self, result: StepResult, *, role: str) -> str:
        norms, factor = self._history(role), self._config.grad_norm_factor
        least = min(LEAST_HISTORY_UPDATES, self._config.grad_norm_window_updates)
        if factor == 0 or len(norms) < least:
            return ""
        median = statistics.median(norms)
        if result.grad_norm <= factor * median:
            return ""
        return (
            f"its gradient norm {result.grad_norm:.4g} is more than {factor:g} times "
            f"{median:.4g}, the median of the last {len(norms)} (faults.grad_norm_factor)"
        )

    def _found(self, reason: str, *, phase: str, place: str, update: Update) -> None:
        """Save the batch, then end the run or go on, as configured."""
        self._is_bad = True
        saved = self._save(update.batch, place=place)
        self._last_reason = f"{phase} of step {self._step}, {reason}"
        if self._config.bad_step == "skip":
            self._say(f"skipped: {self._last_reason}{saved}")
            return
        if self._group is not None:  # a rank that leaves ends the others: rank 0 writes first
            dist.barrier(group=self._group)
        raise JobError(
            f"bad step on all ranks in {self._last_reason}. It was not taken: weights and "
            f"optimizer are as before{saved}. {WAY_OUT}, or set faults.bad_step=skip"
        )

    def _save(self, batch: RaggedBatch, *, place: str) -> str:
        """On rank 0. Says where, for a message: ranks do not agree on more than the path."""
        keep = self._config.keep_bad_batches
        if keep == 0:
            return ""
        path = self._folder / f"step_{self._step:06d}_{place}.pt"
        if self._rank == 0:
            try:
                self._folder.mkdir(exist_ok=True)
                save_batch(batch, path=path)
                for old in sorted(self._folder.glob("step_*.pt"))[:-keep]:
                    old.unlink()
            except OSError as error:
                logger.warning("%s could not be written: %s", path, error)
        return f"; its batch is in {path} (rlhf_megatron.batch.load_batch)"


def check_weights(
    roles: Mapping[str, ModelEngine], *, group: dist.ProcessGroup, device: torch.device, when: str
) -> None:
    """Raise JobError on all ranks, naming rank and parameter, where weights are not finite.
    Collective over the job: one all-reduce of a number."""
    own = [f"{role}: {name}" for role, e in roles.items() for name in e.nonfinite_weights()]
    flag = torch.tensor([len(own)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    if not int(flag):
        return
    rank = dist.get_rank()
    found = gather_lists([(rank, own)] if own else [], group=group)
    shown = "; ".join(
        f"rank {rank}: {', '.join(names[:SHOWN_PARAMETERS])}"
        + (f" and {len(names) - SHOWN_PARAMETERS} more" if len(names) > SHOWN_PARAMETERS else "")
        for rank, names in found[:SHOWN_PARAMETERS]
    )
    raise JobError(
        f"weights are not finite {when}, on {len(found)} rank(s): {shown}. They cannot be mended "
        "by leaving out a step: start the same command again to go on from the last checkpoint. "
        "If it comes back at another place each time, suspect the device of the rank"
    )


def describe_nonfinite(batch: RaggedBatch) -> str:
    """The fields of the batch that hold NaN or infinity: "3 of 96 old_logprobs"; "" if none."""
    fields: Sequence[tuple[str, Tensor]] = [*batch.sample.items(), *batch.response.items()]
    found = []
    for name, values in fields:
        if values.is_floating_point():
            wrong = int((~torch.isfinite(values)).sum())
            if wrong:
                found.append(f"{wrong} of {len(values)} {name} that are not finite")
    return ", ".join(found)


def _reason_not_finite(result: StepResult) -> str:
    wrong = [
        f"{name}={value}" for name, value in result.metrics.items() if not math.isfinite(value)
    ]
    reasons = [", ".join(wrong)] if wrong else []
    if result.nonfinite_rank >= 0:
        reasons.append(f"the gradient on rank {result.nonfinite_rank} is not finite")
    return "; ".join(reasons)
