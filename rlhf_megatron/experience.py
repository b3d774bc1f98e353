"""From prompts to scored responses: the rollout and reward phases, over all engines."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.data.exchange import gather_batch, gather_lists, share_out
from rlhf_megatron.data.prompts import PromptRow
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.distributed.groups import RoleGroups
from rlhf_megatron.errors import UserError
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.observability.rollouts import RolloutRow
from rlhf_megatron.rewards.contract import (
    BackgroundScorer,
    PendingScores,
    Scorer,
    ScoringInput,
)
from rlhf_megatron.rewards.score import ScoringFailure, score_batch, stop_error
from rlhf_megatron.rollout.contract import Prompt, RolloutEngine, SamplingParameters
from rlhf_megatron.stopping import StepAbandoned


@dataclass(frozen=True, kw_only=True)
class Experience:
    """One step's responses with their scores, the same on every rank."""

    batch: RaggedBatch
    rows: list[RolloutRow]
    failed: list[ScoringFailure]
    """Samples without a usable score: dropped, or given reward.error_value."""
    kept: torch.Tensor
    """[batch's samples] int64: which of the rollout's are in `batch`."""
    num_dropped: int
    counts: dict[str, float]
    """What background scorers have met, over all ranks."""

    def metrics(self) -> dict[str, float]:
        return {
            "reward/dropped": float(self.num_dropped),
            "faults/reward_failures": float(len(self.failed)),
            **self.counts,
        }


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """One step's responses, the same on every rank, whose scores may be in the making."""

    batch: RaggedBatch
    by_id: dict[int, PromptRow]
    prefix: str
    samples: list[ScoringInput]
    """What this rank scores of them."""
    pending: PendingScores | None
    """Of `samples`; None where the rank itself scores them, in `score`."""


class ExperienceMaker:
    """Answers prompts with the engines, scores the responses, and gathers both."""

    def __init__(
        self,
        *,
        engine: RolloutEngine | None,
        engines: Sequence[tuple[int, ...]],
        tokenizer: Tokenizer,
        scorer: Scorer,
        on_error: str,
        error_value: float,
        reward: RoleGroups,
        rank: int,
        job_group: dist.ProcessGroup,
        device: torch.device,
        ledger: PhaseLedger,
    ) -> None:
        self._reward, self._rank, self._device = reward, rank, device
        self._engine, self._engines = engine, list(engines)
        self._tokenizer, self._scorer, self._on_error = tokenizer, scorer, on_error
        self._error_value = error_value
        self._group, self._ledger = job_group, ledger
        self.overlaps = isinstance(scorer, BackgroundScorer)
        """Whether responses are scored while the ranks do something else."""
        self._replica = self._shard = 0
        if engine is not None:
            self._replica = self._engines.index(engine.ranks)
            self._shard = engine.ranks.index(rank)

    def run(
        self,
        rows: Sequence[PromptRow],
        *,
        sampling: SamplingParameters,
        step: int,
        prefix: str = "",
    ) -> Experience:
        """Collective over the job. `prefix` names the phases ("evaluation_" in an evaluation)."""
        return self.score(self.roll_out(rows, sampling=sampling, step=step, prefix=prefix))

    def roll_out(
        self,
        rows: Sequence[PromptRow],
        *,
        sampling: SamplingParameters,
        step: int,
        prefix: str = "",
    ) -> Rollouts:
        """The first half of `run`; where it `overlaps`, scoring has begun. Collective."""
        with self._ledger.phase(f"{prefix}rollout"):
            part = self._generate(rows, sampling=sampling, step=step)
            begin = time.perf_counter()
            batch = gather_batch(part, group=self._group)
            self._ledger.communication.record(
                "exchange",
                collective="all_gather_object",
                num_bytes=batch.num_bytes - (part.num_bytes if part is not None else 0),
                seconds=time.perf_counter() - begin,
            )
            by_id = {row.prompt_id: row for row in rows}
            samples = self._samples(batch, by_id=by_id)
            pending = None
            if isinstance(self._scorer, BackgroundScorer):
                pending = self._scorer.start(samples)
        return Rollouts(batch=batch, by_id=by_id, prefix=prefix, samples=samples, pending=pending)

    def score(self, rollouts: Rollouts) -> Experience:
        """The second half of `run`: each sample's reward, and the samples that have one.

        Collective over the job. Raises the same on all ranks: UserError under reward.on_error=stop,
        StepAbandoned instead where the fault lies with reward servers in a training step, and
        UserError where no sample has a score.
        """
        batch = rollouts.batch
        with self._ledger.phase(f"{rollouts.prefix}reward"):
            failed = gather_lists(self._score(rollouts), group=self._group)
            counts = self._gather_counts()
            table = self._rows(batch, by_id=rollouts.by_id)
        if failed and self._on_error == "stop":
            away = [failure for failure in failed if failure.unavailable]
            if away and not rollouts.prefix:
                raise StepAbandoned(
                    f"reward servers that gave no score of {len(away)} responses "
                    f"(reward.on_error=stop; the first: {away[0]})"
                )
            raise stop_error(failed)
        kept = (~torch.isnan(batch.sample["rewards"])).nonzero()[:, 0]
        if len(kept) == 0:
            raise UserError(
                f"reward: none of the step's {len(batch)} samples could be scored; "
                f"the first: {failed[0]}"
            )
        num_dropped = len(batch) - len(kept)
        return Experience(
            batch=batch.select(kept) if num_dropped else batch,
            rows=table,
            failed=failed,
            kept=kept,
            num_dropped=num_dropped,
            counts=counts,
        )

    def _generate(
        self, rows: Sequence[PromptRow], *, sampling: SamplingParameters, step: int
    ) -> RaggedBatch | None:
        """This rank's share of its engine's responses; None on a rank without an engine."""
        if self._engine is None:
            return None
        mine = share_out(len(rows), part=self._replica, num_parts=len(self._engines))
        prompts = [
            Prompt(prompt_id=rows[i].prompt_id, token_ids=tuple(rows[i].token_ids)) for i in mine
        ]
        batch = self._engine.generate(prompts, sampling=sampling, step=step)
        # Every rank of an engine holds all its responses; each hands on a share.
        shard = share_out(len(batch), part=self._shard, num_parts=len(self._engine.ranks))
        return batch.select(list(shard))

    def _share(self, batch: RaggedBatch) -> range:
        """The ranks of the reward role share the samples, whichever engine they came from."""
        ranks = self._reward.layout.ranks
        return share_out(len(batch), part=ranks.index(self._rank), num_parts=len(ranks))

    def _samples(self, batch: RaggedBatch, *, by_id: dict[int, PromptRow]) -> list[ScoringInput]:
        """What this rank is to score."""
        samples = []
        for index in self._share(batch):
            row = by_id[int(batch.sample["prompt_ids"][index])]
            samples.append(
                ScoringInput(
                    prompt=row.text,
                    response=self._tokenizer.decode(batch.response_tokens(index)),
                    prompt_id=row.prompt_id,
                    sample_index=int(batch.sample["sample_indices"][index]),
                    fields=row.fields,
                    messages=row.messages,
                )
            )
        return samples

    def _score(self, rollouts: Rollouts) -> list[ScoringFailure]:
        """Adds `rewards` to the batch, NaN where a sample is dropped; returns this rank's failures.
        Under "stop" they are dropped for now: all ranks have to know before any raises."""
        batch, pending, scorer = rollouts.batch, rollouts.pending, self._scorer
        scores = score_batch(
            rollouts.samples,
            scorer=scorer if pending is None else lambda _: pending.result(),
            on_error="drop" if self._on_error == "stop" else self._on_error,
            error_value=self._error_value,
        )
        rewards = torch.zeros(len(batch), device=self._device)
        rewards[list(self._share(batch))] = scores.rewards.to(self._device)
        begin = time.perf_counter()
        dist.all_reduce(rewards, group=self._group)
        self._ledger.communication.record(
            "rewards",
            collective="all_reduce",
            num_bytes=rewards.nbytes,
            seconds=time.perf_counter() - begin,
        )
        batch.sample["rewards"] = rewards.cpu()
        return scores.failed

    def _gather_counts(self) -> dict[str, float]:
        if not isinstance(self._scorer, BackgroundScorer):
            return {}
        total: dict[str, float] = {}
        for counts in gather_lists([self._scorer.take_counts()], group=self._group):
            for name, value in counts.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def _rows(self, batch: RaggedBatch, *, by_id: dict[int, PromptRow]) -> list[RolloutRow]:
        """What a person reads of the step, dropped samples included; texts on rank 0 only."""
        if dist.get_rank() != 0:
            return []
        sample = {name: values.tolist() for name, values in batch.sample.items()}
        return [
            RolloutRow(
                prompt=by_id[sample["prompt_ids"][i]].text,
                response=self._tokenizer.decode(batch.response_tokens(i)),
                reward=None if math.isnan(sample["rewards"][i]) else sample["rewards"][i],
                truncated=bool(sample["truncated"][i]),
                prompt_tokens=int(batch.prompt_lengths[i]),
                response_tokens=int(batch.response_lengths[i]),
                prompt_id=sample["prompt_ids"][i],
                sample_index=sample["sample_indices"][i],
                weight_version=sample["weight_versions"][i],
            )
            for i in range(len(batch))
        ]
