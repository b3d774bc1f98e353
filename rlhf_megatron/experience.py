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
from rlhf_megatron.rewards.score import Scorer, ScoringFailure, ScoringInput, score_batch
from rlhf_megatron.rollout.contract import Prompt, RolloutEngine, SamplingParameters


@dataclass(frozen=True, kw_only=True)
class Experience:
    """One step's responses with their scores, the same on every rank."""

    batch: RaggedBatch
    rows: list[RolloutRow]
    failed: list[ScoringFailure]
    """Samples without a usable score: dropped, or given reward.error_value."""
    num_dropped: int

    def metrics(self) -> dict[str, float]:
        return {
            "reward/dropped": float(self.num_dropped),
            "faults/reward_failures": float(len(self.failed)),
        }


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
        with self._ledger.phase(f"{prefix}reward"):
            by_id = {row.prompt_id: row for row in rows}
            failed = self._score(batch, by_id=by_id)
            failed = gather_lists(failed, group=self._group)
            table = self._rows(batch, by_id=by_id)
            kept = (~torch.isnan(batch.sample["rewards"])).nonzero()[:, 0]
            if len(kept) == 0:
                raise UserError(
                    f"reward: none of the step's {len(batch)} samples could be scored; "
                    f"the first: {failed[0]}"
                )
            num_dropped = len(batch) - len(kept)
            if num_dropped:
                batch = batch.select(kept)
        return Experience(batch=batch, rows=table, failed=failed, num_dropped=num_dropped)

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

    def _score(self, batch: RaggedBatch, *, by_id: dict[int, PromptRow]) -> list[ScoringFailure]:
        """Adds `rewards` to the batch, NaN where a sample is dropped; returns this rank's failures.

        The ranks of the reward role share the samples, whichever engine they came from.
        """
        ranks = self._reward.layout.ranks
        mine = share_out(len(batch), part=ranks.index(self._rank), num_parts=len(ranks))
        samples = []
        for index in mine:
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
        scores = score_batch(
            samples, scorer=self._scorer, on_error=self._on_error, error_value=self._error_value
        )
        rewards = torch.zeros(len(batch), device=self._device)
        rewards[list(mine)] = scores.rewards.to(self._device)
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
