"""Responses and their scores, with an engine and a scorer that are made up, in one process."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.data.prompts import PromptRow
from rlhf_megatron.errors import UserError
from rlhf_megatron.experience import Experience, ExperienceMaker
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.response_stream import ResponseStream
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
    """Answers prompt i with i + 1 tokens i, each sample; the last finishes first."""

    def __init__(self, *, ranks: tuple[int, ...] = (0,)) -> None:
        self.ranks = ranks
        self.events: list[str] = []
        self.fails_after: int | None = None
        """Responses after which it raises."""

    def generate(
        self,
        prompts: Sequence[Any],
        *,
        sampling: SamplingParameters,
        step: int,
        on_response: Any = None,
    ) -> RaggedBatch:
        count = sampling.responses_per_prompt
        ids = [prompt.prompt_id for prompt in prompts for _ in range(count)]
        responses = [[i] * (i + 1) for i in ids]
        for index in reversed(range(len(ids))):
            if self.fails_after == len(ids) - 1 - index:
                raise StepAbandoned("a signal")
            self.events.append(f"finished {ids[index]}.{index % count}")
            if on_response is not None:
                on_response(index, token_ids=responses[index])
        self.events.append("all finished")
        return RaggedBatch(
            tokens=torch.tensor(
                [t for i, r in zip(ids, responses, strict=True) for t in [7, i, *r]]
            ),
            prompt_lengths=torch.full((len(ids),), 2),
            response_lengths=torch.tensor([len(r) for r in responses]),
            sample={
                "prompt_ids": torch.tensor(ids),
                "sample_indices": torch.arange(len(ids)) % count,
                "truncated": torch.zeros(len(ids), dtype=torch.int64),
                "weight_versions": torch.zeros(len(ids), dtype=torch.int64),
            },
        )


class Scoring(PendingScores):
    """Its scorer's outcomes, of samples in whatever order."""

    def __init__(self, scorer: "Background") -> None:
        self.scorer = scorer
        self.samples: list[ScoringInput] = []
        self.is_complete = self.is_cancelled = False

    def add(self, sample: ScoringInput) -> None:
        assert not self.is_complete
        self.samples.append(sample)
        self.scorer.phases.append(self.scorer.ledger.current_phase)
        self.scorer.events.append(f"added {sample.prompt_id}.{sample.sample_index}")

    def all_added(self) -> None:
        self.is_complete = True

    @property
    def num_scored(self) -> int:
        return len(self.samples) // 2

    def result(self) -> list[Any]:
        assert self.is_complete and not self.is_cancelled
        self.scorer.phases.append(self.scorer.ledger.current_phase)
        return [self.scorer.outcomes[sample.prompt_id] for sample in self.samples]

    def cancel(self) -> None:
        self.is_cancelled = True


class Background(BackgroundScorer):
    """`outcomes` by prompt; remembers in which phases it was asked."""

    def __init__(self, outcomes: list[Any], ledger: PhaseLedger) -> None:
        self.outcomes, self.ledger = outcomes, ledger
        self.phases: list[str | None] = []
        self.events: list[str] = []
        self.scorings: list[Scoring] = []

    def begin(self) -> PendingScores:
        self.scorings.append(Scoring(self))
        return self.scorings[-1]

    def take_counts(self) -> dict[str, float]:
        return {"reward/made_up": 2.0}


def maker_of(
    scorer: Any,
    *,
    group: Any,
    ledger: PhaseLedger,
    engine: Engine | None = None,
    engines: Sequence[tuple[int, ...]] = ((0,),),
    **options: Any,
) -> ExperienceMaker:
    tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens)))
    return ExperienceMaker(
        engine=engine or Engine(),  # type: ignore[arg-type]
        engines=engines,
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
    assert scorer.phases == ["rollout"] * 4
    (scoring,) = scorer.scorings
    assert [s.response for s in scoring.samples] == ["3 3 3 3", "2 2 2", "1 1", "0"]
    assert [s.fields["k"] for s in scoring.samples] == [3, 2, 1, 0]
    with ledger.phase("value"):  # what is added meanwhile goes the way of its sample
        rollouts.batch.response["values"] = torch.arange(10.0)
    found = maker.score(rollouts)
    assert scorer.phases == ["rollout"] * 4 + ["reward"]
    assert found.batch.sample["rewards"].tolist() == [1.0, 4.0]
    assert found.kept.tolist() == [0, 3] and found.num_dropped == 2
    assert found.batch.response["values"].tolist() == [0.0, 6.0, 7.0, 8.0, 9.0]
    assert [f.reason for f in found.failed] == ["lost", "returned nan"]
    assert [row.reward for row in found.rows] == [1.0, None, None, 4.0]
    assert found.metrics() == {
        "reward/dropped": 2.0,
        "faults/reward_failures": 2.0,
        "reward/made_up": 2.0,
        "reward/scored_in_rollout": 2.0,
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


ROW_SAMPLE = ScoringInput(prompt="", response="", prompt_id=0, sample_index=0)
TWICE = replace(SAMPLING, responses_per_prompt=2)


def everything(found: Experience) -> dict[str, Any]:
    """Of an experience, comparable, without what background scorers count."""
    return {
        "tokens": found.batch.tokens.tolist(),
        "sample": {name: values.tolist() for name, values in found.batch.sample.items()},
        "rows": found.rows,
        "failed": found.failed,
        "kept": found.kept.tolist(),
        "dropped": found.num_dropped,
    }


@pytest.mark.parametrize("on_error", ["drop", "value"])
def test_a_streamed_rollout_is_the_one_scored_afterwards(group: Any, on_error: str) -> None:
    ledger = PhaseLedger(rank=0, device=CPU)
    outcomes = [0.5, ValueError("no"), math.inf, 1]
    engine = Engine()
    scorer = Background(outcomes, ledger)
    scorer.events = engine.events  # one list, in the order of what happens
    options = {"group": group, "ledger": ledger, "on_error": on_error}
    streamed = maker_of(scorer, engine=engine, **options).run(ROWS, sampling=TWICE, step=1)
    backwards = [f"{prompt}.{sample}" for prompt in (3, 2, 1, 0) for sample in (1, 0)]
    assert engine.events == [
        *(f"{what} {name}" for name in backwards for what in ("finished", "added")),
        "all finished",
    ]
    plain = maker_of(lambda samples: [outcomes[s.prompt_id] for s in samples], **options)
    expected = everything(plain.run(ROWS, sampling=TWICE, step=1))
    assert everything(streamed) == expected
    assert [(f.prompt_id, f.sample_index) for f in streamed.failed] == [
        *((1, 0), (1, 1), (2, 0), (2, 1))
    ]


def test_scores_begin_after_the_gather_where_other_ranks_roll_out(group: Any) -> None:
    ledger = PhaseLedger(rank=0, device=CPU)
    scorer = Background([1.0, 2.0, 3.0, 4.0], ledger)
    engine = Engine()
    scorer.events = engine.events
    maker = maker_of(scorer, group=group, ledger=ledger, engine=engine, engines=[(0,), (1,)])
    found = maker.run(ROWS, sampling=SAMPLING, step=1)  # the other engine answers elsewhere
    assert engine.events == [
        "finished 2.0",
        "finished 0.0",
        "all finished",
        "added 0.0",
        "added 2.0",
    ]
    assert found.batch.sample["rewards"].tolist() == [1.0, 3.0]
    assert "reward/scored_in_rollout" not in found.metrics()


def test_an_abandoned_rollout_leaves_nothing_for_the_next(group: Any) -> None:
    ledger = PhaseLedger(rank=0, device=CPU)
    scorer, engine = Background([1.0, 2.0, 3.0, 4.0], ledger), Engine()
    maker = maker_of(scorer, group=group, ledger=ledger, engine=engine)
    engine.fails_after = 2
    with pytest.raises(StepAbandoned):
        maker.run(ROWS, sampling=SAMPLING, step=1)
    engine.fails_after = None
    rollouts = maker.roll_out(ROWS, sampling=SAMPLING, step=1)
    assert rollouts.pending is scorer.scorings[1]
    found = maker.run(ROWS, sampling=SAMPLING, step=1, prefix="evaluation_")
    assert [len(scoring.samples) for scoring in scorer.scorings] == [2, 4, 4]
    assert [scoring.is_cancelled for scoring in scorer.scorings] == [True, True, False]
    assert found.batch.sample["rewards"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_scores_that_are_asked_for_again_are_those_of_the_batch(group: Any) -> None:
    ledger = PhaseLedger(rank=0, device=CPU)
    scorer = Background([1.0, 2.0, 3.0, 4.0], ledger)
    maker = maker_of(scorer, group=group, ledger=ledger)
    rollouts = maker.again(maker.roll_out(ROWS, sampling=TWICE, step=1))
    assert rollouts.pending is None and rollouts.own_rows == list(range(8))
    found = maker.score(rollouts)
    assert found.batch.sample["rewards"].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
    assert found.metrics()["reward/scored_in_rollout"] == 0.0


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_ranks_of_an_engine_share_its_responses(num_ranks: int) -> None:
    ledger = PhaseLedger(rank=0, device=CPU)

    def to_sample(index: int, token_ids: Sequence[int]) -> ScoringInput:
        text = str(list(token_ids))
        return ScoringInput(prompt="", response=text, prompt_id=index, sample_index=0)

    taken: list[int] = []
    for rank in range(num_ranks):
        share = range(rank, 4, num_ranks)
        scoring = Scoring(Background([], ledger))
        stream = ResponseStream(scoring, share=share, to_sample=to_sample)
        for index in (2, 0, 3, 1):
            stream(index, token_ids=[index])
        stream.close()
        assert scoring.is_complete and scoring.samples == stream.samples
        mine = [sample.prompt_id for sample in stream.samples]
        assert mine == [index for index in (2, 0, 3, 1) if index in share]
        assert [share[place] for place in stream.places] == mine
        assert [sample.response for sample in stream.samples] == [f"[{index}]" for index in mine]
        taken += mine
    assert sorted(taken) == [0, 1, 2, 3]


def test_a_response_that_never_came_is_noticed() -> None:
    scoring = Scoring(Background([], PhaseLedger(rank=0, device=CPU)))
    stream = ResponseStream(scoring, share=range(2), to_sample=lambda *_: ROW_SAMPLE)
    stream(1, token_ids=[3])
    with pytest.raises(AssertionError, match="missing or twice"):
        stream.close()
