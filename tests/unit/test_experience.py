"""Responses and their scores, with an engine and a scorer that are made up, in one process."""

import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.data.prompts import PromptRow
from rlhf_megatron.errors import UserError
from rlhf_megatron.experience import ExperienceMaker
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.rewards.contract import (
    BackgroundScorer,
    NoScoreError,
    PendingScores,
    ScoringInput,
)
from rlhf_megatron.role_exchange import ExchangeGroups, RoleExchange
from rlhf_megatron.role_ranks import RolePlacement
from rlhf_megatron.rollout.contract import SamplingParameters
from rlhf_megatron.stopping import StepAbandoned

CPU = torch.device("cpu")
ROWS = [
    PromptRow(prompt_id=i, text=f"p{i}", token_ids=(7, i), messages=None, fields={"k": i})
    for i in range(4)
]


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Engine:
    """Answers prompt i with i + 1 tokens i."""

    ranks = (0,)

    def generate(self, prompts: Sequence[Any], **_: Any) -> RaggedBatch:
        ids = [prompt.prompt_id for prompt in prompts]
        responses = [[i] * (i + 1) for i in ids]
        return RaggedBatch(
            tokens=torch.tensor(
                [t for i, r in zip(ids, responses, strict=True) for t in [7, i, *r]]
            ),
            prompt_lengths=torch.full((len(ids),), 2),
            response_lengths=torch.tensor([len(r) for r in responses]),
            sample={
                "prompt_ids": torch.tensor(ids),
                **{
                    name: torch.zeros(len(ids), dtype=torch.int64)
                    for name in ("sample_indices", "truncated", "weight_versions")
                },
            },
        )


class Background(BackgroundScorer):
    """Hands out `outcomes`; remembers in which phase it was asked."""

    def __init__(self, outcomes: list[Any], ledger: PhaseLedger) -> None:
        self.outcomes, self.ledger = outcomes, ledger
        self.phases: list[str | None] = []
        self.samples: list[ScoringInput] = []

    def start(self, samples: Sequence[ScoringInput]) -> PendingScores:
        self.samples = list(samples)
        self.phases.append(self.ledger.current_phase)
        outer = self

        class Pending(PendingScores):
            def result(self) -> list[Any]:
                outer.phases.append(outer.ledger.current_phase)
                return outer.outcomes

        return Pending()

    def take_counts(self) -> dict[str, float]:
        return {"reward/made_up": 2.0}


def maker_of(scorer: Any, *, group: Any, ledger: PhaseLedger, **options: Any) -> ExperienceMaker:
    tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens)))
    return ExperienceMaker(
        engine=Engine(),  # type: ignore[arg-type]
        engines=[(0,)],
        tokenizer=tokenizer,  # type: ignore[arg-type]
        scorer=scorer,
        overlaps=isinstance(scorer, BackgroundScorer),
        exchange=RoleExchange(
            RolePlacement(world_size=1, ranks={"reward": (0,)}),
            groups=ExchangeGroups(outside={}, sync=None),
            rank=0,
            ledger=ledger,
        ),
        rank=0,
        job_group=group,
        device=CPU,
        ledger=ledger,
        **({"on_error": "drop", "error_value": -1.0} | options),
    )


SAMPLING = SamplingParameters(
    temperature=1.0, max_response_tokens=8, responses_per_prompt=1, stop_token_ids=()
)


def test_scores_are_made_while_the_ranks_do_something_else(group: Any) -> None:
    ledger = PhaseLedger(rank=0, device=CPU)
    scorer = Background([1.0, NoScoreError("lost"), math.nan, 4.0], ledger)
    maker = maker_of(scorer, group=group, ledger=ledger)
    assert maker.overlaps
    rollouts = maker.roll_out(ROWS, sampling=SAMPLING, step=3)
    assert scorer.phases == ["rollout"]
    assert [s.response for s in scorer.samples] == ["0", "1 1", "2 2 2", "3 3 3 3"]
    with ledger.phase("value"):  # what is added meanwhile goes the way of its sample
        rollouts.batch.response["values"] = torch.arange(10.0)
    found = maker.score(rollouts)
    assert scorer.phases == ["rollout", "reward"]
    assert found.batch.sample["rewards"].tolist() == [1.0, 4.0]
    assert found.kept.tolist() == [0, 3] and found.num_dropped == 2
    assert found.batch.response["values"].tolist() == [0.0, 6.0, 7.0, 8.0, 9.0]
    assert [f.reason for f in found.failed] == ["lost", "returned nan"]
    assert [row.reward for row in found.rows] == [1.0, None, None, 4.0]
    assert found.metrics() == {
        "reward/dropped": 2.0,
        "faults/reward_failures": 2.0,
        "reward/made_up": 2.0,
    }


def test_a_plain_scorer_is_called_in_its_phase(group: Any) -> None:
    ledger = PhaseLedger(rank=0, device=CPU)

    def score(samples: Sequence[ScoringInput]) -> list[Any]:
        assert ledger.current_phase == "evaluation_reward"
        return [sample.fields["k"] for sample in samples]

    maker = maker_of(score, group=group, ledger=ledger)
    assert not maker.overlaps
    found = maker.run(ROWS, sampling=SAMPLING, step=0, prefix="evaluation_")
    assert found.batch.sample["rewards"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found.metrics() == {"reward/dropped": 0.0, "faults/reward_failures": 0.0}


def test_what_servers_that_are_gone_mean_under_each_policy(group: Any) -> None:
    ledger = PhaseLedger(rank=0, device=CPU)
    gone = [NoScoreError("http://a: Connection refused", unavailable=True)] * 3
    options = {"group": group, "ledger": ledger}
    stop = maker_of(Background([*gone, 1.0], ledger), on_error="stop", **options)
    with pytest.raises(StepAbandoned, match=r"no score of 3 responses .*http://a: Connection"):
        stop.run(ROWS, sampling=SAMPLING, step=1)
    with pytest.raises(UserError, match="reward: 3 responses have no score; prompt 0, sample 0"):
        stop.run(ROWS, sampling=SAMPLING, step=0, prefix="evaluation_")
    wrong = maker_of(Background([NoScoreError("no"), 1, 1, 1], ledger), on_error="stop", **options)
    with pytest.raises(UserError, match="reward: 1 response has no score; prompt 0, sample 0: no"):
        wrong.run(ROWS, sampling=SAMPLING, step=1)
    value = maker_of(Background([*gone, 1.0], ledger), on_error="value", **options)
    found = value.run(ROWS, sampling=SAMPLING, step=1)
    assert found.batch.sample["rewards"].tolist() == [-1.0, -1.0, -1.0, 1.0]
    drop = maker_of(Background([*gone, *gone[:1]], ledger), **options)
    with pytest.raises(UserError, match="none of the step's 4 samples could be scored; the first"):
        drop.run(ROWS, sampling=SAMPLING, step=1)
