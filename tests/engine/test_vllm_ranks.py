"""Two vLLM engines of two ranks each, on every other rank of four."""

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import (
    EOS,
    KINDS,
    greedy_oracle,
    logprob_oracle,
    make_model,
    make_prompts,
    save_config,
    write_weights,
)

from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.rollout.contract import Prompt, RolloutEngine, SamplingParameters

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

ENGINES = [(0, 2), (1, 3)]
CHECKED = ("llama", "one_kv_head_tied")
SAMPLED = SamplingParameters(
    temperature=0.7, max_response_tokens=16, responses_per_prompt=2, stop_token_ids=(EOS,)
)
GREEDY = SamplingParameters(
    temperature=0.0, max_response_tokens=16, responses_per_prompt=1, stop_token_ids=(EOS,)
)


def engine_rank(rank: int, scratch: Path) -> dict[str, Any]:
    from rlhf_megatron.rollout.factory import build_engine, resolve_engine
    from rlhf_megatron.rollout.vllm_fit import level_group_count
    from rlhf_megatron.rollout.worlds import make_engine_groups

    device = torch.device("cpu")
    results: dict[str, Any] = {}
    results["resolved"] = resolve_engine("auto", device=device)
    groups = make_engine_groups(ENGINES, device=device)
    replica = next(i for i, ranks in enumerate(ENGINES) if rank in ranks)
    for kind in CHECKED:
        directory = save_config(kind, scratch / f"{kind}_{rank}")
        start = time.perf_counter()
        engine = build_engine(
            results["resolved"].name,
            model_dir=directory,
            config=RolloutConfig(max_num_seqs=16, tensor_parallel_size=2),
            ranks=ENGINES[replica],
            replica=replica,
            group=groups[replica],
            dtype="float32",
            run_seed=5,
            max_model_len=128,
            device=device,
        )
        level_group_count()
        results[kind] = {"llm_seconds": time.perf_counter() - start, **observe(engine, kind)}
        results[kind]["trainer"] = use_trainer_groups(rank)
    results["other_ranks"] = build_on_other_ranks(rank, scratch / f"llama_{rank}")
    results["trainer_at_last"] = use_trainer_groups(rank)
    return results


def build_on_other_ranks(rank: int, directory: Path) -> str:
    """What is said of a second set of engines in the same processes, on neighbours."""
    from rlhf_megatron.rollout.factory import build_engine
    from rlhf_megatron.rollout.vllm_fit import level_group_count
    from rlhf_megatron.rollout.worlds import make_engine_groups

    engines = [(0, 1), (2, 3)]
    replica = rank // 2
    message = ""
    try:
        build_engine(
            "vllm",
            model_dir=directory,
            config=RolloutConfig(max_num_seqs=16, tensor_parallel_size=2),
            ranks=engines[replica],
            replica=replica,
            group=make_engine_groups(engines, device="cpu")[replica],
            dtype="float32",
            run_seed=5,
            max_model_len=128,
            device=torch.device("cpu"),
        )
    except RuntimeError as error:
        message = str(error)
    level_group_count()
    return message


def use_trainer_groups(rank: int) -> list[float]:
    """Sums of the ranks over the default group and over one made afterwards."""
    sums = []
    for group in (None, dist.new_group([0, 1, 3])):
        value = torch.tensor([float(rank)])
        if group is None or rank in (0, 1, 3):
            dist.all_reduce(value, group=group)
        sums.append(value.item())
    return sums


def prompts_of(kind: str) -> list[Prompt]:
    return make_prompts(KINDS[kind]["vocab_size"], lengths=[4, 5, 6, 7, 8, 9, 3, 70])


def observe(engine: RolloutEngine, kind: str) -> dict[str, Any]:
    prompts = prompts_of(kind)
    seen: dict[str, Any] = {"greedy": []}
    for version in range(2):
        write_weights(engine, model=make_model(kind, seed=version + 1), version=version)
        batch = engine.generate(prompts, sampling=GREEDY, step=0)
        seen["greedy"].append([batch.response_tokens(i) for i in range(len(batch))])
    start = time.perf_counter()
    seen["sampled"] = engine.generate(prompts, sampling=SAMPLED, step=1)
    seen["generate_seconds"] = time.perf_counter() - start
    return seen


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, run_ranks) -> list[dict[str, Any]]:
    found = run_ranks(engine_rank, world_size=4, scratch=tmp_path_factory.mktemp("ranks"))
    for rank, result in enumerate(found):
        seconds = [(k, result[k]["llm_seconds"], result[k]["generate_seconds"]) for k in CHECKED]
        print("rank", rank, seconds)
    return found


def test_auto_takes_vllm_and_says_so(results: list[dict[str, Any]]) -> None:
    assert {r["resolved"].name for r in results} == {"vllm"}
    assert "vLLM" in results[0]["resolved"].reason


@pytest.mark.parametrize("kind", CHECKED)
def test_greedy_equals_transformers_before_and_after_an_update(
    results: list[dict[str, Any]], kind: str
) -> None:
    expected = [
        [greedy_oracle(make_model(kind, seed=seed), prompt=p, tokens=16) for p in prompts_of(kind)]
        for seed in (1, 2)
    ]
    assert expected[0] != expected[1]
    assert [result[kind]["greedy"] for result in results] == [expected] * 4


@pytest.mark.parametrize("kind", CHECKED)
def test_engines_agree_since_seeds_belong_to_requests(
    results: list[dict[str, Any]], kind: str
) -> None:
    first = results[0][kind]["sampled"]
    assert all(torch.equal(r[kind]["sampled"].tokens, first.tokens) for r in results)
    model = make_model(kind, seed=2)
    expected = torch.cat(
        [
            logprob_oracle(
                model,
                prompt=first.prompt_tokens(i),
                response=first.response_tokens(i),
                temperature=SAMPLED.temperature,
            )
            for i in range(len(first))
        ]
    )
    for result in results:
        difference = expected - result[kind]["sampled"].response["rollout_logprobs"]
        assert difference.abs().max() <= 1e-4


@pytest.mark.parametrize("kind", CHECKED)
def test_trainer_groups_work_beside_the_engines(results: list[dict[str, Any]], kind: str) -> None:
    assert [r[kind]["trainer"] for r in results] == [[6.0, 4.0], [6.0, 4.0], [6.0, 2.0], [6.0, 4.0]]


def test_a_second_set_of_ranks_in_one_process_is_refused(results: list[dict[str, Any]]) -> None:
    """vLLM would reduce over the first engines' ranks, and answer garbage without an error."""
    for rank, result in enumerate(results):
        first, second = ENGINES[rank % 2], [(0, 1), (2, 3)][rank // 2]
        assert f"has ranks {list(first)}, the engine has {list(second)}" in result["other_ranks"]
        assert result["trainer_at_last"] == result["llama"]["trainer"]
