"""Bad steps: updates that would spoil the weights, found before the optimizer has taken them.

An update is judged by figures that are the same on all ranks of its role, so that they decide
alike; ranks outside the role take its judgements over before the step ends.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from rlhf_megatron.updates import Update

logger = logging.getLogger(__name__)

FOLDER = "bad_batches"
LEAST_HISTORY_UPDATES = 10
"""Norms that a role needs before one can be far outside them; fewer where the window is smaller."""
SHOWN_PARAMETERS = 3
WHOLE_STEP = "step"
ROLES_IN_ORDER = (WHOLE_STEP, "critic", "actor")
"""In the order in which a step judges them."""
WAY_OUT = "Look at the step's rewards and lengths; lower the learning rate or the gradient clip"


@dataclass
class Judgements:
    """What became of a role's updates in one step."""

    reasons: list[str] = field(default_factory=list)
    """Of those that were not taken, in order."""
    norms: list[float] = field(default_factory=list)
    """Of those that were, where the guard looks at them."""


@dataclass(frozen=True, kw_only=True)
class Judges:
    """The ranks that decide together on a role's updates."""

    group: dist.ProcessGroup | None
    """None in a single process."""
    is_writer: bool
    """Whether this rank is the one that saves a bad batch."""


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
        check_weights: Callable[[str, str], None] = lambda when, role: None,
        judges: Mapping[str, Judges] | None = None,
    ) -> None:
        """`group`: the job's, None in a single process. `judges`: of the roles that are on this
        rank and not on all. `check_weights`: raises JobError where the cause lies in weights that
        are not finite; its arguments say when, and the role whose ranks call it, "" for all."""
        self._check_weights = check_weights
        self._config, self._folder = config, output_dir / FOLDER
        self._say = say
        self._everyone = Judges(group=group, is_writer=rank == 0)
        self._judges = dict(judges or {})
        self._norms: dict[str, deque[float]] = {}
        self._step = 0
        self._found_in: dict[str, Judgements] = {}
        self._last_reason = ""
        self.bad_steps = self.bad_in_row = 0

    @property
    def wants_norm(self) -> bool:
        """Whether the gradient norm has to be known before the update."""
        return self._config.grad_norm_factor > 0

    def step_begins(self, step: int) -> None:
        self._step, self._found_in = step, {}

    def takes(self, result: StepResult, *, update: Update) -> bool:
        """Whether the update may happen. Raises JobError on all ranks of the role where it must end
        the run."""
        reason = _reason_not_finite(result)
        if reason:
            apart = update.role if update.role in self._judges else ""
            self._check_weights(f"in update_{update.role} of step {self._step}", apart)
        reason = reason or self._reason_outlier(result, role=update.role)
        if not reason:
            if self.wants_norm:
                self._history(update.role).append(result.grad_norm)
                self.judgements(update.role).norms.append(result.grad_norm)
            return True
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
        self._check_weights(f"in step {self._step}, before its updates", "")
        everything = range(len(batch))
        update = Update(role=WHOLE_STEP, number=0, count=0, step_batch=batch, samples=everything)
        reason = f"the batch holds {wrong}, though the weights are finite"
        self._found(reason, phase="value", place="outputs", update=update)
        return False

    def judgements(self, role: str) -> Judgements:
        """Those of the step so far."""
        return self._found_in.setdefault(role, Judgements())

    def take_over(self, role: str, *, judgements: Judgements) -> None:
        """On a rank outside the role: what its ranks have decided in the step."""
        self._found_in[role] = judgements
        self._history(role).extend(judgements.norms)
        for reason in judgements.reasons:
            self._say(f"skipped: {reason}")

    def step_ends(self) -> dict[str, float]:
        """The step's metrics. Raises JobError on all ranks after too many bad steps in a row."""
        reasons = {
            role: self._found_in[role].reasons for role in ROLES_IN_ORDER if role in self._found_in
        }
        is_bad = any(reasons.values())
        if is_bad:
            self._last_reason = [text for texts in reasons.values() for text in texts][-1]
        self.bad_steps += is_bad
        self.bad_in_row = self.bad_in_row + 1 if is_bad else 0
        limit = self._config.max_bad_steps_in_row
        if self.bad_in_row >= limit:
            raise JobError(
                f"bad steps in a row: {limit}, up to step {self._step} "
                f"(faults.max_bad_steps_in_row={limit}); the last: {self._last_reason}. {WAY_OUT}"
            )
        return {
            "faults/bad_steps": float(self.bad_steps),
            "faults/skipped_updates": float(
                sum(len(texts) for role, texts in reasons.items() if role != WHOLE_STEP)
            ),
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
        judges = self._judges.get(update.role, self._everyone)
        saved = self._save(update.batch, place=place, is_writer=judges.is_writer)
        found = f"{phase} of step {self._step}, {reason}"
        if self._config.bad_step == "skip":
            self.judgements(update.role).reasons.append(found)
            self._say(f"skipped: {found}{saved}")
            return
        if judges.group is not None:  # a rank that leaves ends the others: the writer comes first
            dist.barrier(group=judges.group)
        whose = f"of the {update.role} " if update.role in self._judges else ""
        raise JobError(
            f"bad step on all ranks {whose}in {found}. It was not taken: weights and "
            f"optimizer are as before{saved}. {WAY_OUT}, or set faults.bad_step=skip"
        )

    def _save(self, batch: RaggedBatch, *, place: str, is_writer: bool) -> str:
        """On one rank. Says where, for a message: ranks do not agree on more than the path."""
        keep = self._config.keep_bad_batches
        if keep == 0:
            return ""
        path = self._folder / f"step_{self._step:06d}_{place}.pt"
        if is_writer:
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
    """Raise JobError on all ranks of the group, naming rank and parameter, where weights are not
    finite. `roles`: this rank's. Collective over `group`: one all-reduce of a number."""
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
