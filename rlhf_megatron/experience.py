"""From prompts to scored responses: the rollout and reward phases, over all engines."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.data.exchange import gather_batch, gather_lists, share_out
from rlhf_megatron.data.prompts import PromptRow
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import UserError
from rlhf_megatron.observability.ledger import EXCHANGE, PhaseLedger
from rlhf_megatron.observability.rollouts import RolloutRow
from rlhf_megatron.response_stream import ResponseStream
from rlhf_megatron.rewards.contract import (
    BackgroundScorer,
    PendingScores,
    Scorer,
    ScoringInput,
)
from rlhf_megatron.rewards.score import Scores, ScoringFailure, score_batch, stop_error
from rlhf_megatron.role_exchange import RoleExchange
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
    own_rows: list[int]
    """Indices in `batch` of what this rank scores."""
    samples: list[ScoringInput]
    """Those, in that order."""
    pending: PendingScores | None
    """Of `samples`; None where the rank itself scores them, in `score`."""
    num_scored_early: int = 0
    """Of `samples`, those whose score was there before the rollout had ended."""


@dataclass(frozen=True, kw_only=True)
class RolloutPart:
    """One rank's share of its engine's responses."""

    batch: RaggedBatch
    stream: ResponseStream | None
    """None where their scoring begins once all ranks' parts are together."""


@dataclass(frozen=True, kw_only=True)
class _Merged:
    """What the ranks of the reward role found."""

    failed: list[ScoringFailure]
    counts: dict[str, float]
    rows: list[RolloutRow]


class ExperienceMaker:
    """Answers prompts with the engines, scores the responses, and gathers both.

    Where the placement is split, a rank enters the phases rollout and reward if it has a part in
    them, and all meet in the phase exchange.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine | None,
        engines: Sequence[tuple[int, ...]],
        tokenizer: Tokenizer,
        scorer: Scorer | None,
        overlaps: bool,
        on_error: str,
        error_value: float,
        exchange: RoleExchange,
        rank: int,
        job_group: dist.ProcessGroup,
        device: torch.device,
        ledger: PhaseLedger,
    ) -> None:
        """`scorer`: None on a rank without the reward role. `overlaps`: whether responses are
        scored while the ranks do something else, known on all ranks."""
        assert scorer is None or overlaps == isinstance(scorer, BackgroundScorer)
        self._exchange, self._rank, self._device = exchange, rank, device
        self._reward_ranks = exchange.placement.ranks["reward"]
        self._engine, self._engines = engine, list(engines)
        self._tokenizer, self._scorer, self._on_error = tokenizer, scorer, on_error
        self._error_value = error_value
        self._group, self._ledger = job_group, ledger
        self.overlaps = overlaps
        # Elsewhere the ranks that score do not have the responses before the gather.
        engine_ranks = sorted(r for ranks in self._engines for r in ranks)
        self._streams = overlaps and engine_ranks == sorted(self._reward_ranks)
        self._pending: PendingScores | None = None
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
        """The first half of `run`; where it `overlaps`, scoring has begun. Collective.

        Scores of earlier rollouts that are still in the making are given up.
        """
        if not self._exchange.is_split:
            with self._ledger.phase(f"{prefix}rollout"):
                part = self._generate(rows, sampling=sampling, step=step)
                return self._gather(part, rows=rows, prefix=prefix)
        part = self.generate(rows, sampling=sampling, step=step, prefix=prefix)
        return self.gather(part, rows=rows, prefix=prefix)

    def generate(
        self,
        rows: Sequence[PromptRow],
        *,
        sampling: SamplingParameters,
        step: int,
        prefix: str = "",
    ) -> RolloutPart | None:
        """This rank's part of a rollout, to be given to `gather`. Collective over the engine."""
        if self._engine is None and self._exchange.is_split:
            return None
        with self._ledger.phase(f"{prefix}rollout"):
            return self._generate(rows, sampling=sampling, step=step)

    def gather(
        self, part: RolloutPart | None, *, rows: Sequence[PromptRow], prefix: str = ""
    ) -> Rollouts:
        """All ranks' parts; where it `overlaps`, scoring has begun. Collective over the job."""
        with self._exchange.joined(prefix=prefix):
            return self._gather(part, rows=rows, prefix=prefix)

    def score(self, rollouts: Rollouts) -> Experience:
        """The second half of `run`: each sample's reward, and the samples that have one.

        Collective over the job. Raises the same on all ranks: UserError under reward.on_error=stop,
        StepAbandoned instead where the fault lies with reward servers in a training step, and
        UserError where no sample has a score.
        """
        if not self._exchange.is_split:
            with self._ledger.phase(f"{rollouts.prefix}reward"):
                merged = self._merge(rollouts, own=self._score(rollouts))
        else:
            own = None
            if self._scorer is not None:
                with self._ledger.phase(f"{rollouts.prefix}reward"):
                    own = self._score(rollouts)
            with self._exchange.joined(prefix=rollouts.prefix):
                merged = self._merge(rollouts, own=own)
        return self._judged(rollouts, merged=merged)

    def again(self, rollouts: Rollouts) -> Rollouts:
        """The same without scores, to be scored once more."""
        own_rows = list(self._share(rollouts.batch))
        samples = self._samples(rollouts.batch, rows=own_rows, by_id=rollouts.by_id)
        return replace(
            rollouts, own_rows=own_rows, samples=samples, pending=None, num_scored_early=0
        )

    def restored(
        self, rollouts: Rollouts, *, failed: list[ScoringFailure], counts: dict[str, float]
    ) -> Experience:
        """What `score` returned, from a batch with its rewards, NaN where a sample was dropped."""
        rows = self._rows(rollouts)
        merged = _Merged(failed=failed, counts=counts, rows=rows)
        return self._judged(rollouts, merged=merged)

    def _judged(self, rollouts: Rollouts, *, merged: _Merged) -> Experience:
        batch, failed = rollouts.batch, merged.failed
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
            rows=merged.rows,
            failed=failed,
            kept=kept,
            num_dropped=num_dropped,
            counts=merged.counts,
        )

    def _gather(
        self, part: RolloutPart | None, *, rows: Sequence[PromptRow], prefix: str
    ) -> Rollouts:
        gathered = gather_batch(part.batch if part is not None else None, group=self._group)
        self._ledger.communication.record(
            EXCHANGE,
            collective="broadcast",
            num_bytes=gathered.bytes_received,
            seconds=gathered.seconds,
        )
        batch, by_id = gathered.batch, {row.prompt_id: row for row in rows}
        if part is not None and part.stream is not None:
            stream = part.stream
            return Rollouts(
                batch=batch,
                by_id=by_id,
                prefix=prefix,
                own_rows=[gathered.own_rows[place] for place in stream.places],
                samples=stream.samples,
                pending=stream.pending,
                num_scored_early=stream.num_scored,
            )
        own_rows = list(self._share(batch))
        samples = self._samples(batch, rows=own_rows, by_id=by_id)
        pending = None
        if isinstance(self._scorer, BackgroundScorer):
            self._give_up_scores()
            self._pending = pending = self._scorer.start(samples)
        return Rollouts(
            batch=batch,
            by_id=by_id,
            prefix=prefix,
            own_rows=own_rows,
            samples=samples,
            pending=pending,
        )

    def _generate(
        self, rows: Sequence[PromptRow], *, sampling: SamplingParameters, step: int
    ) -> RolloutPart | None:
        """None on a rank without an engine."""
        if self._engine is None:
            return None
        dealt = share_out(len(rows), part=self._replica, num_parts=len(self._engines))
        mine = [rows[i] for i in dealt]
        count = len(mine) * sampling.responses_per_prompt
        # Every rank of an engine holds all its responses; each hands on a share.
        share = share_out(count, part=self._shard, num_parts=len(self._engine.ranks))
        stream = None
        if self._streams:
            stream = self._open_stream(mine, sampling=sampling, share=share)
        batch = self._engine.generate(
            [Prompt(prompt_id=r.prompt_id, token_ids=tuple(r.token_ids)) for r in mine],
            sampling=sampling,
            step=step,
            on_response=stream,
        )
        if stream is not None:
            stream.close()
        return RolloutPart(batch=batch.select(list(share)), stream=stream)

    def _open_stream(
        self, rows: Sequence[PromptRow], *, sampling: SamplingParameters, share: range
    ) -> ResponseStream:
        """rows: prompts of this rank's engine, whose responses come in the order of (prompt,
        sample)."""
        assert isinstance(self._scorer, BackgroundScorer)

        def to_sample(index: int, token_ids: Sequence[int]) -> ScoringInput:
            prompt, sample_index = divmod(index, sampling.responses_per_prompt)
            return self._sample(rows[prompt], sample_index=sample_index, token_ids=token_ids)

        self._give_up_scores()
        self._pending = self._scorer.begin()
        return ResponseStream(self._pending, share=share, to_sample=to_sample)

    def _give_up_scores(self) -> None:
        """Of a step that was abandoned before anyone waited for them."""
        if self._pending is not None:
            self._pending.cancel()

    def _share(self, batch: RaggedBatch) -> range:
        """The ranks of the reward role share the samples, whichever engine they came from."""
        ranks = self._reward_ranks
        if self._rank not in ranks:
            return range(0)
        return share_out(len(batch), part=ranks.index(self._rank), num_parts=len(ranks))

    def _samples(
        self, batch: RaggedBatch, *, rows: Sequence[int], by_id: dict[int, PromptRow]
    ) -> list[ScoringInput]:
        prompt_ids, sample_indices = (
            batch.sample[name].tolist() for name in ("prompt_ids", "sample_indices")
        )
        return [
            self._sample(
                by_id[prompt_ids[index]],
                sample_index=sample_indices[index],
                token_ids=tokens,
            )
            for index, tokens in zip(rows, batch.responses(rows), strict=True)
        ]

    def _sample(
        self, row: PromptRow, *, sample_index: int, token_ids: Sequence[int]
    ) -> ScoringInput:
        return ScoringInput(
            prompt=row.text,
            response=self._tokenizer.decode(token_ids),
            prompt_id=row.prompt_id,
            sample_index=sample_index,
            fields=row.fields,
            messages=row.messages,
        )

    def _score(self, rollouts: Rollouts) -> Scores:
        """Of this rank's samples. Under "stop" those that fail are dropped for now: all ranks have
        to know before any raises."""
        pending, scorer = rollouts.pending, self._scorer
        assert scorer is not None
        return score_batch(
            rollouts.samples,
            scorer=scorer if pending is None else lambda _: pending.result(),
            on_error="drop" if self._on_error == "stop" else self._on_error,
            error_value=self._error_value,
        )

    def _merge(self, rollouts: Rollouts, *, own: Scores | None) -> _Merged:
        """Adds `rewards` to the batch, NaN where a sample is dropped."""
        batch = rollouts.batch
        rewards = torch.zeros(len(batch), device=self._device)
        if own is not None:
            rewards[rollouts.own_rows] = own.rewards.to(self._device)
        begin = time.perf_counter()
        dist.all_reduce(rewards, group=self._group)
        self._ledger.communication.record(
            EXCHANGE,
            collective="all_reduce",
            num_bytes=rewards.nbytes,
            seconds=time.perf_counter() - begin,
        )
        batch.sample["rewards"] = rewards.cpu()
        failed = gather_lists(own.failed if own is not None else [], group=self._group)
        return _Merged(
            # In one order, whichever rank scored what.
            failed=sorted(failed, key=lambda each: (each.prompt_id, each.sample_index)),
            counts=self._gather_counts(rollouts),
            rows=self._rows(rollouts),
        )

    def _gather_counts(self, rollouts: Rollouts) -> dict[str, float]:
        if not self.overlaps:
            return {}
        own = []
        if isinstance(self._scorer, BackgroundScorer):
            own = [self._scorer.take_counts()]
            if self._streams:
                own[0]["reward/scored_in_rollout"] = float(rollouts.num_scored_early)
        total: dict[str, float] = {}
        for counts in gather_lists(own, group=self._group):
            for name, value in counts.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def _rows(self, rollouts: Rollouts) -> list[RolloutRow]:
        """What a person reads of the step, dropped samples included; texts on rank 0 only."""
        if dist.get_rank() != 0:
            return []
        batch, by_id = rollouts.batch, rollouts.by_id
        texts = self._texts(rollouts)
        prompt_tokens, response_tokens = (
            lengths.tolist() for lengths in (batch.prompt_lengths, batch.response_lengths)
        )
        sample = {name: values.tolist() for name, values in batch.sample.items()}
        return [
            RolloutRow(
                prompt=by_id[sample["prompt_ids"][i]].text,
                response=texts[i],
                reward=None if math.isnan(sample["rewards"][i]) else sample["rewards"][i],
                truncated=bool(sample["truncated"][i]),
                prompt_tokens=prompt_tokens[i],
                response_tokens=response_tokens[i],
                prompt_id=sample["prompt_ids"][i],
                sample_index=sample["sample_indices"][i],
                weight_version=sample["weight_versions"][i],
            )
            for i in range(len(batch))
        ]

    def _texts(self, rollouts: Rollouts) -> dict[int, str]:
        """Every sample's response: what this rank has decoded for its scorer (nothing yet where the
        rollout was restored), and the others."""
        batch, share = rollouts.batch, self._share(rollouts.batch)
        texts = {i: given.response for i, given in zip(share, rollouts.samples, strict=False)}
        others = [i for i in range(len(batch)) if i not in texts]
        for index, tokens in zip(others, batch.responses(others), strict=True):
            texts[index] = self._tokenizer.decode(tokens)
        return texts
