"""One vLLM engine of one rank, against transformers."""

import os
import random
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
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

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.rollout.contract import SamplingParameters
from rlhf_megatron.rollout.seeds import request_seed

# Looked for, not imported: the import alone changes the process.
pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

GREEDY = SamplingParameters(
    temperature=0.0, max_response_tokens=16, responses_per_prompt=1, stop_token_ids=(EOS,)
)
SAMPLED = SamplingParameters(
    temperature=1.0, max_response_tokens=24, responses_per_prompt=3, stop_token_ids=(EOS, 7)
)
CPU = torch.device("cpu")
TORCH_FUNCTIONS = [
    (torch, "Event"),
    (torch.Tensor, "pin_memory"),
    (torch.Tensor, "record_stream"),
    *((torch.cuda, name) for name in ("Event", "Stream", "current_stream", "stream")),
    *((torch.accelerator, name) for name in ("synchronize", "empty_cache", "get_memory_info")),
]
"""What vLLM replaces on a CPU."""
RUN_SEED = 5


def fields(batch: RaggedBatch) -> dict[str, Any]:
    return {**batch.sample, **batch.response, "tokens": batch.tokens}


def logprob_difference(model: Any, *, batch: RaggedBatch, temperature: float) -> float:
    expected = [
        logprob_oracle(
            model,
            prompt=batch.prompt_tokens(i),
            response=batch.response_tokens(i),
            temperature=temperature,
        )
        for i in range(len(batch))
    ]
    return float((torch.cat(expected) - batch.response["rollout_logprobs"]).abs().max())


def global_state() -> dict[str, Any]:
    """What an engine must leave as it was."""
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LD_PRELOAD")
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "set_num_threads": torch.set_num_threads,
        "num_threads": torch.get_num_threads(),
        "world_size": dist.get_world_size(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        **{f"{owner}.{name}": getattr(owner, name, None) for owner, name in TORCH_FUNCTIONS},
        **{name: os.environ.get(name) for name in variables},
    }


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if before[name] != after[name]]


def single_rank(rank: int, scratch: Path) -> dict[str, Any]:
    """Everything that the tests below look at, for each kind of model."""
    from rlhf_megatron.rollout import vllm_fit
    from rlhf_megatron.rollout.vllm import VllmEngine

    vllm_fit.import_vllm(device=CPU)
    results: dict[str, Any] = {"cpu_head_sizes": vllm_fit.cpu_head_sizes()}
    group = dist.new_group([0], backend="gloo")
    for kind in KINDS:
        save_config(kind, scratch / kind)
        before = global_state()
        start = time.perf_counter()
        engine = VllmEngine(
            scratch / kind,
            config=RolloutConfig(max_num_seqs=16),
            ranks=(0,),
            replica=0,
            group=group,
            dtype="float32",
            run_seed=RUN_SEED,
            max_model_len=256,
            device=CPU,
        )
        seconds = time.perf_counter() - start
        after_building = global_state()
        results[kind] = {"llm_seconds": seconds, **observe(engine, kind)}
        results[kind]["changed"] = changes(before, after_building)
    results["dist_alive"] = dist.is_initialized()
    return results


def observe(engine: Any, kind: str) -> dict[str, Any]:
    vocab = KINDS[kind]["vocab_size"]
    # 8 short prompts, and 2 that begin alike and fill several blocks of the KV cache.
    prompts = make_prompts(vocab, lengths=[4, 5, 6, 7, 8, 9, 3, 2, 100, 150])
    models = [make_model(kind, seed=seed) for seed in (1, 2)]
    seen: dict[str, Any] = {"greedy": [], "greedy_expected": [], "greedy_logprob_difference": []}
    for version, model in enumerate(models):
        write_weights(engine, model=model, version=version)
        batch = engine.generate(prompts, sampling=GREEDY, step=0)
        seen["greedy"].append([batch.response_tokens(i) for i in range(len(batch))])
        seen["greedy_expected"].append([greedy_oracle(model, prompt=p, tokens=16) for p in prompts])
        seen["greedy_logprob_difference"].append(
            logprob_difference(model, batch=batch, temperature=1.0)
        )
    for temperature in (1.0, 0.7):
        sampling = replace(SAMPLED, temperature=temperature)
        before, start = global_state(), time.perf_counter()
        batch = engine.generate(prompts, sampling=sampling, step=3)
        seen[f"generate_seconds_{temperature}"] = time.perf_counter() - start
        seen["changed_by_generate"] = changes(before, global_state())
        seen[f"sampled_{temperature}"] = batch
        seen[f"difference_{temperature}"] = logprob_difference(
            models[-1], batch=batch, temperature=temperature
        )
    seen["parts"] = [
        engine.generate(part, sampling=SAMPLED, step=3) for part in (prompts[:3], prompts[3:])
    ]
    seen["other_step"] = engine.generate(prompts, sampling=SAMPLED, step=4)
    seen["empty"] = engine.generate([], sampling=SAMPLED, step=3)
    engine._config.seed_per = "engine"
    seen["engine_seeded"] = [
        engine.generate(prompts, sampling=SAMPLED, step=step) for step in (3, 3, 4)
    ]
    return seen


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, run_ranks) -> dict[str, Any]:
    found = run_ranks(single_rank, world_size=1, scratch=tmp_path_factory.mktemp("single"))[0]
    for kind in KINDS:
        seconds = {k: round(v, 2) for k, v in found[kind].items() if "seconds" in k}
        print(kind, seconds)
    return found


@pytest.fixture(params=list(KINDS))
def seen(results: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    return results[request.param]


def test_greedy_equals_transformers_after_each_write_in_place(seen: dict[str, Any]) -> None:
    assert seen["greedy"][0] == seen["greedy_expected"][0]
    assert seen["greedy"][1] == seen["greedy_expected"][1]
    assert seen["greedy"][0] != seen["greedy"][1]


def test_logprobs_are_those_of_the_tempered_distribution(seen: dict[str, Any]) -> None:
    assert seen["difference_1.0"] <= 1e-4
    assert seen["difference_0.7"] <= 1e-4
    assert max(seen["greedy_logprob_difference"]) <= 1e-4


def test_samples_come_in_order_with_all_fields(seen: dict[str, Any]) -> None:
    batch = seen["sampled_1.0"]
    assert batch.sample["prompt_ids"].tolist() == [i for i in range(10) for _ in range(3)]
    assert batch.sample["sample_indices"].tolist() == [0, 1, 2] * 10
    assert batch.sample["weight_versions"].tolist() == [1] * 30
    assert batch.sample["seeds"].tolist() == [
        request_seed(RUN_SEED, step=3, prompt_id=i, sample_index=j)
        for i in range(10)
        for j in range(3)
    ]
    assert batch.response["loss_mask"].tolist() == [1.0] * batch.num_response_tokens
    assert len({tuple(batch.response_tokens(i)) for i in range(30)}) > 20


def test_stop_tokens_end_responses_and_stay_in_them(seen: dict[str, Any]) -> None:
    ends = set()
    for temperature in (1.0, 0.7):
        batch = seen[f"sampled_{temperature}"]
        for i in range(len(batch)):
            response = batch.response_tokens(i)
            stops = [t for t in response if t in SAMPLED.stop_token_ids]
            if batch.sample["truncated"][i]:
                assert len(response) == 24 and not stops
                ends.add("length")
            else:
                assert stops == response[-1:]
                ends.add("stop")
    assert ends == {"stop", "length"}


def test_a_response_does_not_depend_on_its_neighbours(seen: dict[str, Any]) -> None:
    together = seen["sampled_1.0"]
    parts = [part.response_tokens(i) for part in seen["parts"] for i in range(len(part))]
    assert parts == [together.response_tokens(i) for i in range(len(together))]
    other = seen["other_step"]
    assert parts != [other.response_tokens(i) for i in range(len(other))]


def test_an_engine_seed_gives_one_stream_per_step(seen: dict[str, Any]) -> None:
    first, again, other = (fields(batch) for batch in seen["engine_seeded"])
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["tokens"], other["tokens"])
    assert len(set(first["seeds"].tolist())) == 1


def test_no_prompts_give_an_empty_batch_with_all_fields(seen: dict[str, Any]) -> None:
    empty, full = fields(seen["empty"]), fields(seen["sampled_1.0"])
    assert len(seen["empty"]) == 0
    assert {n: (v.dtype, len(v)) for n, v in empty.items()} == {
        n: (v.dtype, 0) for n, v in full.items()
    }


def test_the_process_is_left_as_it_was(results: dict[str, Any]) -> None:
    assert results["dist_alive"]
    assert [results[kind]["changed"] for kind in KINDS] == [[]] * len(KINDS)
    assert [results[kind]["changed_by_generate"] for kind in KINDS] == [[]] * len(KINDS)


def test_head_sizes_with_a_kernel_are_known(results: dict[str, Any]) -> None:
    """Those of the models here, and not the smaller ones that `check_head_size` refuses."""
    sizes = {KINDS[kind].get("head_dim", 32) for kind in KINDS}
    assert sizes <= set(results["cpu_head_sizes"])
    assert not {16, 24} & set(results["cpu_head_sizes"])
