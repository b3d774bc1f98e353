"""A PPO step one batch ahead (pipeline.depth=1): what does not need the newest weights runs beside.

    side by side   rollout of batch k+1 | update_critic on batch k
    all meet       batch k+1 is gathered, its rewards begin
    side by side   update_actor on batch k, log_prob of batch k+1, reshard | value of batch k+1
    all meet       what step k+1 needs of batch k+1 is known on all ranks

Batch k+1 is sampled by the weights before the update on batch k, and updated on by those after it:
one step off policy, which the importance weights correct (algorithms/importance.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.data.prompts import PromptRow
from rlhf_megatron.experience import Experience, Rollouts
from rlhf_megatron.ppo import score_metrics
from rlhf_megatron.rewards.score import ScoringFailure
from rlhf_megatron.step import StepOutcome, TrainingStep
from rlhf_megatron.stopping import StepAbandoned
from rlhf_megatron.updates import UpdateReport


@dataclass(frozen=True, kw_only=True)
class ReadyBatch:
    """A batch with all that its updates need but the advantages, the same on all ranks."""

    rollouts: Rollouts
    """With the log-probs and values of the present weights."""
    last_values: torch.Tensor
    """[samples of the rollouts]"""
    experience: Experience | None
    """What of it has a score; None where reward servers have not given theirs."""


class InFlight:
    """The batch that the next step updates on. A TensorState: a resumed run cannot roll it out
    again, since the weights that have are gone."""

    def __init__(self, *, restore: Callable[..., Experience], prompts: Sequence[PromptRow]) -> None:
        """restore: ExperienceMaker.restored. prompts: all that a batch may be of."""
        self.ready: ReadyBatch | None = None
        self._restore = restore
        self._rows = {row.prompt_id: row for row in prompts}

    def tensor_state(self) -> dict[str, Any] | None:
        ready = self.ready
        if ready is None:
            return None
        batch, experience = ready.rollouts.batch, ready.experience
        return {
            "tokens": batch.tokens,
            "prompt_lengths": batch.prompt_lengths,
            "response_lengths": batch.response_lengths,
            "sample": dict(batch.sample),
            "response": dict(batch.response),
            "last_values": ready.last_values,
            "is_scored": experience is not None,
            "failed": [asdict(failure) for failure in experience.failed] if experience else [],
            "counts": dict(experience.counts) if experience else {},
        }

    def load_tensor_state(self, state: dict[str, Any]) -> None:
        parts = ("tokens", "prompt_lengths", "response_lengths", "sample", "response")
        batch = RaggedBatch(**{name: state[name] for name in parts})
        ids = batch.sample["prompt_ids"].tolist()
        rollouts = Rollouts(
            batch=batch,
            by_id={i: self._rows[i] for i in ids},
            prefix="",
            own_rows=[],
            samples=[],
            pending=None,
        )
        experience = None
        if state["is_scored"]:
            failed = [ScoringFailure(**failure) for failure in state["failed"]]
            experience = self._restore(rollouts, failed=failed, counts=state["counts"])
        self.ready = ReadyBatch(
            rollouts=rollouts, last_values=state["last_values"], experience=experience
        )


@dataclass(kw_only=True)
class PipelinedStep(TrainingStep):
    """As its base, and at the end of each step the next one's batch is ready."""

    in_flight: InFlight = field(repr=False)

    def run(self, step: int) -> StepOutcome:
        """Raises what its base raises; where reward servers fail, in the step after."""
        self.ledger.start_step(step)
        self.bad_steps.step_begins(step)
        ready = self.in_flight.ready or self._first(step)
        experience = ready.experience or self.maker.score(self.maker.again(ready.rollouts))
        # A copy: the batch in flight stays as it is, for the checkpoint of a step that is given up.
        batch = _copy(experience.batch)
        metrics = score_metrics(batch) | experience.metrics()
        plan, found = self._advantages(
            batch,
            last_values=ready.last_values[experience.kept],
            plan=self.ppo.plan(batch, step=step),
            step=step,
        )
        metrics |= found
        self.updates_begin()
        critic, following = self._critic_beside_rollout(batch, plan=plan, step=step)
        actor = self._update_actor(batch, plan=plan, step=step)
        outputs = {}
        if following is not None:
            following_plan = self.ppo.plan(following.batch, step=step + 1)
            outputs = self._own_outputs(following.batch, plan=following_plan[0])
        sync = self._sync_after(step)
        next_experience = self._scored(following) if following is not None else None
        with self.exchange.joined():
            updates = self._tell_updates(critic=critic, actor=actor, sync=sync)
            self.in_flight.ready = None
            if following is not None:
                last_values = self._tell_outputs(following.batch, own=outputs)
                self.in_flight.ready = _ready(following, last_values, next_experience)
        metrics |= self._after_updates(batch, updates=updates, metrics=metrics, step=step)
        return StepOutcome(metrics=metrics, experience=experience)

    def _first(self, step: int) -> ReadyBatch:
        """Where no step before has left a batch: one that the present weights roll out."""
        rollouts = self.maker.roll_out(self.loader.next_step(), sampling=self.sampling, step=step)
        with self.weights.asleep(version=step - 1):
            plan = self.ppo.plan(rollouts.batch, step=step)
            outputs = self._own_outputs(rollouts.batch, plan=plan[0])
        experience = self.maker.score(rollouts)
        with self.exchange.joined():
            last_values = self._tell_outputs(rollouts.batch, own=outputs)
        return _ready(rollouts, last_values, experience)

    def _critic_beside_rollout(
        self, batch: RaggedBatch, *, plan: list, step: int
    ) -> tuple[UpdateReport | None, Rollouts | None]:
        """The critic's updates on this batch, and the next batch's rollout, at the same time where
        no rank has both. No rollout in the last step."""
        rows = self.loader.next_step() if step < self.config.run.steps else []
        if self.exchange.placement.share_ranks("critic", "rollout"):
            rollouts = None
            if rows:  # first, so that rewards begin
                rollouts = self.maker.roll_out(rows, sampling=self.sampling, step=step + 1)
            self.weights.sleep()
            return self._update_critic(batch, plan=plan, step=step), rollouts
        part = None
        if rows:
            part = self.maker.generate(rows, sampling=self.sampling, step=step + 1)
        critic = self._update_critic(batch, plan=plan, step=step)
        rollouts = self.maker.gather(part, rows=rows) if rows else None
        self.weights.sleep()
        return critic, rollouts

    def _scored(self, rollouts: Rollouts) -> Experience | None:
        """None where reward servers are away: this step's updates are done, and the next step asks
        again before it changes anything."""
        try:
            return self.maker.score(rollouts)
        except StepAbandoned:
            return None


def _ready(
    rollouts: Rollouts, last_values: torch.Tensor, experience: Experience | None
) -> ReadyBatch:
    """The samples that have a score get the log-probs and values, too."""
    if experience is not None and experience.num_dropped:
        experience = replace(experience, batch=rollouts.batch.select(experience.kept))
    return ReadyBatch(rollouts=rollouts, last_values=last_values, experience=experience)


def _copy(batch: RaggedBatch) -> RaggedBatch:
    """With fields of its own; the tensors are shared, and never changed in place."""
    return replace(batch, sample=dict(batch.sample), response=dict(batch.response))
