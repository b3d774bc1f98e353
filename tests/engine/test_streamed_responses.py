"""Responses handed on as they finish, by a vLLM engine of two ranks: nothing of them changes."""

import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import EOS, KINDS, make_model, make_prompts, save_config, write_weights

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.data.prompts import PromptRow
from rlhf_megatron.experience import Experience, ExperienceMaker
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.rewards.function import FunctionScorer, load_reward_function
from rlhf_megatron.rewards.pool import WorkerPool
from rlhf_megatron.role_exchange import ExchangeGroups, RoleExchange
from rlhf_megatron.role_ranks import RolePlacement
from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.rollout.contract import ResponseListener, RolloutEngine, SamplingParameters

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

CPU = torch.device("cpu")
RANKS = (0, 1)
KIND = "llama"
PROMPTS = make_prompts(KINDS[KIND]["vocab_size"], lengths=[4, 5, 6, 7, 8, 9, 3])
SAMPLED = SamplingParameters(
    temperature=1.0,
    max_response_tokens=24,
    responses_per_prompt=3,
    stop_token_ids=(EOS, *range(3, 25)),  # so that they end at different times
)
SLOW_REWARD = """
import time

def score(prompt, response, number):
    time.sleep(0.2)
    if number == 5:
        raise ValueError("not this one")
    return len(response) + number
"""


def fields(batch: RaggedBatch) -> dict[str, Any]:
    found = {**batch.sample, **batch.response, "tokens": batch.tokens}
    return {name: values.tolist() for name, values in found.items()}


def all_at_once(llm: Any, inputs: Any, parameters: Any) -> Iterator[tuple[int, Any]]:
    """vllm_fit.finished_outputs by way of LLM.generate."""
    outputs = llm.generate(inputs, parameters, use_tqdm=False)
    yield from ((index, output.outputs[0]) for index, output in enumerate(outputs))


class Waiting:
    """The engine, which before its last response waits until a score is there."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine, self.ranks = engine, engine.ranks
        self.num_scored_meanwhile = 0

    def generate(
        self, prompts: Any, *, on_response: Any = None, sampling: Any, step: int
    ) -> RaggedBatch:
        left = len(prompts) * sampling.responses_per_prompt

        def listen(index: int, *, token_ids: Sequence[int]) -> None:
            nonlocal left
            left -= 1
            ends = time.monotonic() + 60.0
            while left == 0 and on_response.pending.num_scored == 0:
                assert time.monotonic() < ends, "nothing is scored while the engine generates"
                time.sleep(0.01)
            self.num_scored_meanwhile = on_response.pending.num_scored
            on_response(index, token_ids=token_ids)

        listener: ResponseListener | None = listen if on_response is not None else None
        return self.engine.generate(prompts, sampling=sampling, step=step, on_response=listener)


def engine_rank(rank: int, scratch: Path) -> dict[str, Any]:
    from rlhf_megatron.rollout.factory import build_engine
    from rlhf_megatron.rollout.vllm_fit import level_group_count
    from rlhf_megatron.rollout.worlds import make_engine_groups

    engine = build_engine(
        "vllm",
        model_dir=save_config(KIND, scratch / f"model_{rank}"),
        config=RolloutConfig(max_num_seqs=4, tensor_parallel_size=2),
        ranks=RANKS,
        replica=0,
        group=make_engine_groups([RANKS], device=CPU)[0],
        dtype="float32",
        run_seed=5,
        max_model_len=128,
        device=CPU,
    )
    level_group_count()
    write_weights(engine, model=make_model(KIND, seed=1), version=0)
    return {"engine": observe(engine), "experience": score(engine, rank=rank, scratch=scratch)}


def observe(engine: Any) -> dict[str, Any]:
    """What it generates in today's ways, and after a rollout that was broken off."""
    from rlhf_megatron.rollout import vllm_fit

    heard: list[tuple[int, list[int]]] = []

    def listen(index: int, *, token_ids: Sequence[int]) -> None:
        heard.append((index, list(token_ids)))

    def break_off(index: int, *, token_ids: Sequence[int]) -> None:
        heard.append((index, []))
        if len(heard) == 5:
            raise InterruptedError

    seen: dict[str, Any] = {}
    for per in ("request", "engine"):
        engine._config.seed_per = per
        with vllm_fit.replaced(vllm_fit, "finished_outputs", all_at_once):
            seen[f"{per}_at_once"] = fields(engine.generate(PROMPTS, sampling=SAMPLED, step=1))
        heard.clear()
        batch = engine.generate(PROMPTS, sampling=SAMPLED, step=1, on_response=listen)
        seen[f"{per}_streamed"] = fields(batch)
        seen[f"{per}_heard"] = list(heard)
        seen[f"{per}_responses"] = [batch.response_tokens(i) for i in range(len(batch))]
        heard.clear()
        with pytest.raises(InterruptedError):
            engine.generate(PROMPTS, sampling=SAMPLED, step=2, on_response=break_off)
        assert not engine._llm.llm_engine.has_unfinished_requests()
        seen[f"{per}_afterwards"] = fields(engine.generate(PROMPTS, sampling=SAMPLED, step=1))
    engine._config.seed_per = "request"
    return seen


def score(engine: RolloutEngine, *, rank: int, scratch: Path) -> dict[str, Any]:
    """The same prompts scored by workers and by the rank itself."""
    (scratch / f"slow_{rank}.py").write_text(SLOW_REWARD)
    function = f"{scratch}/slow_{rank}.py:score"
    pool = WorkerPool(function, workers=2, fields=["number"])
    waiting = Waiting(engine)
    streamed = run(waiting, scorer=pool, overlaps=True, rank=rank)
    pool.close()
    plain = FunctionScorer(load_reward_function(function))
    afterwards = run(engine, scorer=plain, overlaps=False, rank=rank)
    return {
        "streamed": everything(streamed),
        "afterwards": everything(afterwards),
        "num_scored_meanwhile": waiting.num_scored_meanwhile,
        "metrics": streamed.metrics(),
        "plain_metrics": afterwards.metrics(),
    }


def run(engine: Any, *, scorer: Any, overlaps: bool, rank: int) -> Experience:
    world: Any = dist.group.WORLD
    ledger = PhaseLedger(rank=rank, device=CPU)
    maker = ExperienceMaker(
        engine=engine,
        engines=[RANKS],
        tokenizer=SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens))),  # type: ignore[arg-type]
        scorer=scorer,
        overlaps=overlaps,
        on_error="drop",
        error_value=0.0,
        exchange=RoleExchange(
            RolePlacement(world_size=2, ranks={"reward": RANKS}),
            groups=ExchangeGroups(outside={}, sync=None),
            rank=rank,
            ledger=ledger,
        ),
        rank=rank,
        job_group=world,
        device=CPU,
        ledger=ledger,
    )
    rows = [
        PromptRow(
            prompt_id=p.prompt_id,
            text=f"prompt {p.prompt_id}",
            token_ids=p.token_ids,
            messages=None,
            fields={"number": p.prompt_id},
        )
        for p in PROMPTS
    ]
    return maker.run(rows, sampling=SAMPLED, step=1)


def everything(found: Experience) -> dict[str, Any]:
    failed = [(f.prompt_id, f.sample_index, f.response) for f in found.failed]
    return {**fields(found.batch), "rows": found.rows, "failed": failed, "kept": found.kept}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, run_ranks) -> list[dict[str, Any]]:
    return run_ranks(engine_rank, world_size=2, scratch=tmp_path_factory.mktemp("streamed"))


@pytest.mark.parametrize("per", ["request", "engine"])
def test_what_is_streamed_is_what_vllm_generates(results: list[dict[str, Any]], per: str) -> None:
    for result in results:
        seen = result["engine"]
        assert seen[f"{per}_streamed"] == seen[f"{per}_at_once"]
        assert seen[f"{per}_afterwards"] == seen[f"{per}_at_once"]


@pytest.mark.parametrize("per", ["request", "engine"])
def test_each_response_is_heard_of_once_as_it_finishes(
    results: list[dict[str, Any]], per: str
) -> None:
    first, second = (result["engine"] for result in results)
    indices = [index for index, _ in first[f"{per}_heard"]]
    assert sorted(indices) == list(range(21)) and indices != sorted(indices)
    assert dict(first[f"{per}_heard"]) == dict(enumerate(first[f"{per}_responses"]))
    assert first[f"{per}_heard"] == second[f"{per}_heard"]


def test_a_slow_reward_is_at_work_while_the_engine_generates(results: list[dict[str, Any]]) -> None:
    found = [result["experience"] for result in results]
    for each in found:
        assert each["num_scored_meanwhile"] >= 1
        assert each["metrics"]["reward/scored_in_rollout"] >= 2.0  # each rank waited for its first


def test_streamed_scores_are_those_given_afterwards(results: list[dict[str, Any]]) -> None:
    for result in results:
        found = result["experience"]
        streamed, afterwards = found["streamed"], found["afterwards"]
        assert torch.equal(streamed.pop("kept"), afterwards.pop("kept"))
        assert streamed == afterwards
        assert [failure[:2] for failure in streamed["failed"]] == [(5, 0), (5, 1), (5, 2)]
        assert len(streamed["rewards"]) == 18
        assert found["plain_metrics"] == {
            name: value
            for name, value in found["metrics"].items()
            if name not in ("reward/scored_in_rollout", "reward/workers_replaced")
        }
