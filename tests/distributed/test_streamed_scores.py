"""Scores made while engines generate, over ranks: who scores what changes nothing of the result."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks

from rlhf_megatron.batch import RaggedBatch, from_sequences
from rlhf_megatron.data.prompts import PromptRow
from rlhf_megatron.experience import Experience, ExperienceMaker
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.rewards.contract import BackgroundScorer, PendingScores, ScoringInput
from rlhf_megatron.role_exchange import ExchangeGroups, RoleExchange
from rlhf_megatron.role_ranks import RolePlacement
from rlhf_megatron.rollout.contract import SamplingParameters

CPU = torch.device("cpu")
SAMPLING = SamplingParameters(
    temperature=1.0, max_response_tokens=8, responses_per_prompt=3, stop_token_ids=()
)
CASES = {
    "two engines of two ranks": [(0, 2), (1, 3)],
    "one of all ranks": [(0, 1, 2, 3)],
    "one each, more than prompts": [(0,), (1,), (2,), (3,)],
}


class Engine:
    """Answers a prompt by its number and the sample's, in an order of its own."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def generate(
        self, prompts: Sequence[Any], *, sampling: Any, step: int, on_response: Any = None
    ) -> RaggedBatch:
        count = sampling.responses_per_prompt
        pairs = [(prompt, sample) for prompt in prompts for sample in range(count)]
        responses = [[p.prompt_id, sample] * (1 + sample) for p, sample in pairs]
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(step))
        for index in order.tolist():
            if on_response is not None:
                on_response(index, token_ids=responses[index])
        batch = from_sequences([p.token_ids for p, _ in pairs], responses=responses)
        sample = {
            "prompt_ids": torch.tensor([p.prompt_id for p, _ in pairs], dtype=torch.int64),
            "sample_indices": torch.tensor([s for _, s in pairs], dtype=torch.int64),
            "truncated": torch.zeros(len(pairs), dtype=torch.bool),
            "weight_versions": torch.zeros(len(pairs), dtype=torch.int64),
        }
        return replace(batch, sample=sample)


def reward(sample: ScoringInput) -> Any:
    """Depends on all that a sample is made of; some have none."""
    if sample.prompt_id == 3 and sample.sample_index == 1:
        return ValueError("none")
    return len(sample.response) + 100 * sample.fields["number"] + sample.sample_index / 8


class Scoring(PendingScores):
    def __init__(self) -> None:
        self.outcomes: list[Any] = []

    def add(self, sample: ScoringInput) -> None:
        self.outcomes.append(reward(sample))

    def all_added(self) -> None:
        pass

    @property
    def num_scored(self) -> int:
        return len(self.outcomes)

    def result(self) -> list[Any]:
        return self.outcomes

    def cancel(self) -> None:
        pass


class Background(BackgroundScorer):
    def begin(self) -> PendingScores:
        return Scoring()

    def take_counts(self) -> dict[str, float]:
        return {}


def run(
    rank: int, *, engines: list[tuple[int, ...]], num_prompts: int, scorers: Sequence[int] | None
) -> Experience:
    """scorers: ranks of the reward role, which score in the background; None: all ranks, each by
    itself."""
    world: Any = dist.group.WORLD
    mine = next((ranks for ranks in engines if rank in ranks), None)
    reward_ranks = tuple(range(4) if scorers is None else scorers)
    scorer: Any = None
    if rank in reward_ranks:
        scorer = Background() if scorers is not None else lambda s: [reward(each) for each in s]
    placement = RolePlacement(world_size=4, ranks={"reward": reward_ranks})
    ledger = PhaseLedger(rank=rank, device=CPU, apart=placement.phases_apart)
    maker = ExperienceMaker(
        engine=Engine(mine) if mine is not None else None,  # type: ignore[arg-type]
        engines=engines,
        tokenizer=SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens))),  # type: ignore[arg-type]
        scorer=scorer,
        overlaps=scorers is not None,
        on_error="drop",
        error_value=0.0,
        exchange=RoleExchange(
            placement, groups=ExchangeGroups(outside={}, sync=None), rank=rank, ledger=ledger
        ),
        rank=rank,
        job_group=world,
        device=CPU,
        ledger=ledger,
    )
    rows = [
        PromptRow(
            prompt_id=i, text=f"p{i}", token_ids=(9, i), messages=None, fields={"number": i * i}
        )
        for i in range(num_prompts)
    ]
    return maker.run(rows, sampling=SAMPLING, step=2)


def both_ways(
    rank: int, engines: list[tuple[int, ...]], num_prompts: int, scorers: tuple[int, ...]
) -> tuple[Experience, Experience]:
    streamed = run(rank, engines=engines, num_prompts=num_prompts, scorers=scorers)
    return streamed, run(rank, engines=engines, num_prompts=num_prompts, scorers=None)


def check_equal(streamed: Experience, plain: Experience) -> None:
    assert streamed.batch.tokens.tolist() == plain.batch.tokens.tolist()
    for name, values in plain.batch.sample.items():
        assert torch.equal(streamed.batch.sample[name], values), name
    assert (streamed.rows, streamed.failed) == (plain.rows, plain.failed)
    assert streamed.kept.tolist() == plain.kept.tolist()
    assert streamed.num_dropped == plain.num_dropped


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_prompts", [3, 5])
def test_streamed_scores_are_those_of_a_plain_scorer(case: str, num_prompts: int) -> None:
    results = run_ranks(4, both_ways, CASES[case], num_prompts, (0, 1, 2, 3))
    count = 3 * num_prompts
    for streamed, plain in results:
        check_equal(streamed, plain)
        assert streamed.metrics()["reward/scored_in_rollout"] == count
        assert streamed.num_dropped == (1 if num_prompts > 3 else 0)
    found = results[0][0]
    assert found.batch.sample["rewards"][:4].tolist() == [3.0, 7.125, 11.25, 103.0]


@pytest.mark.parametrize("scorers", [(2, 3), (0, 1), (0, 1, 2, 3)])
def test_where_other_ranks_score_they_begin_when_they_have_the_responses(
    scorers: tuple[int, ...],
) -> None:
    """Engines on ranks 0 and 1; only where those score, too, and no others, are scores streamed."""
    for streamed, plain in run_ranks(4, both_ways, [(0,), (1,)], 5, scorers):
        check_equal(streamed, plain)
        has_streamed = "reward/scored_in_rollout" in streamed.metrics()
        assert has_streamed == (scorers == (0, 1))
