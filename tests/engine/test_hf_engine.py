"""The hf engine against transformers and against the distribution it says it draws from."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
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

from rlhf_megatron.errors import UserError
from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.rollout.contract import SamplingParameters
from rlhf_megatron.rollout.factory import build_engine
from rlhf_megatron.rollout.hf import HfEngine

CPU = torch.device("cpu")
SAMPLED = SamplingParameters(
    temperature=1.0, max_response_tokens=12, responses_per_prompt=3, stop_token_ids=(EOS, 7)
)
LENGTHS = [4, 9, 1, 2, 40, 6]


def build(directory: Path, *, max_num_seqs: int = 64, run_seed: int = 5) -> HfEngine:
    return HfEngine(
        directory,
        config=RolloutConfig(max_num_seqs=max_num_seqs),
        ranks=(3,),
        replica=0,
        dtype="float32",
        run_seed=run_seed,
        max_model_len=128,
        device=CPU,
    )


@pytest.fixture(params=list(KINDS))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[HfEngine, Any, int]:
    kind = request.param
    engine, model = build(save_config(kind, tmp_path)), make_model(kind, seed=1)
    write_weights(engine, model=model, version=7)
    return engine, model, KINDS[kind]["vocab_size"]


def test_parameters_hold_each_weight_once_and_live(case: tuple[HfEngine, Any, int]) -> None:
    engine, model, _ = case
    parameters, expected = engine.parameters(), dict(model.named_parameters())
    assert parameters.keys() == expected.keys()
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    pointers = [p.data_ptr() for p in parameters.values()]
    assert len(set(pointers)) == len(pointers)
    assert pointers == [p.data_ptr() for p in engine.parameters().values()]


def test_greedy_equals_transformers(case: tuple[HfEngine, Any, int]) -> None:
    engine, model, vocab = case
    prompts = make_prompts(vocab, lengths=LENGTHS)
    sampling = replace(SAMPLED, temperature=0.0, responses_per_prompt=1, stop_token_ids=(EOS,))
    batch = engine.generate(prompts, sampling=sampling, step=0)
    for i, prompt in enumerate(prompts):
        assert batch.response_tokens(i) == greedy_oracle(model, prompt=prompt, tokens=12)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.7])
def test_logprobs_equal_a_plain_forward(
    case: tuple[HfEngine, Any, int], temperature: float
) -> None:
    engine, model, vocab = case
    prompts = make_prompts(vocab, lengths=LENGTHS)
    batch = engine.generate(prompts, sampling=replace(SAMPLED, temperature=temperature), step=2)
    expected = [
        logprob_oracle(
            model,
            prompt=batch.prompt_tokens(i),
            response=batch.response_tokens(i),
            temperature=temperature or 1.0,
        )
        for i in range(len(batch))
    ]
    assert (torch.cat(expected) - batch.response["rollout_logprobs"]).abs().max() <= 1e-4
    assert batch.sample["weight_versions"].tolist() == [7] * len(batch)


def test_responses_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    directory = save_config("llama", tmp_path)
    prompts = make_prompts(259, lengths=LENGTHS)
    model = make_model("llama", seed=1)
    responses, logprobs = [], []
    for max_num_seqs, parts in ((64, [prompts]), (4, [prompts]), (64, [prompts[:2], prompts[2:]])):
        engine = build(directory, max_num_seqs=max_num_seqs)
        write_weights(engine, model=model, version=0)
        batches = [engine.generate(part, sampling=SAMPLED, step=3) for part in parts]
        responses.append([b.response_tokens(i) for b in batches for i in range(len(b))])
        logprobs.append(torch.cat([b.response["rollout_logprobs"] for b in batches]))
    assert responses[0] == responses[1] == responses[2]
    assert (logprobs[0] - logprobs[1]).abs().max() <= 1e-5
    other_seed = build(directory, run_seed=6)
    write_weights(other_seed, model=model, version=0)
    batch = other_seed.generate(prompts, sampling=SAMPLED, step=3)
    assert responses[0] != [batch.response_tokens(i) for i in range(len(batch))]


def test_responses_are_heard_of_as_their_batch_finishes(tmp_path: Path) -> None:
    engine = build(save_config("llama", tmp_path), max_num_seqs=4)
    write_weights(engine, model=make_model("llama", seed=1), version=0)
    prompts = make_prompts(259, lengths=LENGTHS)
    events: list[Any] = []
    run = engine._run

    def noted(requests: list[Any], **options: Any) -> Any:
        events.append(f"{len(requests)} responses")
        return run(requests, **options)

    engine._run = noted  # type: ignore[method-assign]
    heard: dict[int, list[int]] = {}

    def listen(index: int, *, token_ids: Sequence[int]) -> None:
        events.append(index)
        heard[index] = list(token_ids)

    batch = engine.generate(prompts, sampling=SAMPLED, step=3, on_response=listen)
    count = len(prompts) * SAMPLED.responses_per_prompt
    assert events == [
        entry
        for first in range(0, count, 4)
        for indices in [range(first, min(first + 4, count))]
        for entry in (f"{len(indices)} responses", *indices)
    ]
    assert heard == {i: batch.response_tokens(i) for i in range(len(batch))}


def test_stop_tokens_end_responses_and_stay_in_them(case: tuple[HfEngine, Any, int]) -> None:
    engine, _, vocab = case
    sampling = replace(SAMPLED, responses_per_prompt=16, temperature=1.5)
    batch = engine.generate(make_prompts(vocab, lengths=LENGTHS), sampling=sampling, step=0)
    for i in range(len(batch)):
        response = batch.response_tokens(i)
        stops = [t for t in response if t in sampling.stop_token_ids]
        assert stops == ([] if batch.sample["truncated"][i] else response[-1:])
        assert len(response) == 12 or not batch.sample["truncated"][i]
    assert 0 < int(batch.sample["truncated"].sum()) < len(batch)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_first_tokens_follow_the_softmax(tmp_path: Path, temperature: float) -> None:
    engine = build(save_config("one_kv_head_tied", tmp_path), max_num_seqs=1000)
    model = make_model("one_kv_head_tied", seed=1)
    write_weights(engine, model=model, version=0)
    (prompt,) = make_prompts(61, lengths=[6])
    draws = 4000
    sampling = replace(
        SAMPLED, temperature=temperature, max_response_tokens=1, responses_per_prompt=draws
    )
    tokens = engine.generate([prompt], sampling=sampling, step=0).tokens.view(draws, -1)[:, -1]
    with torch.no_grad():
        logits = model(torch.tensor([prompt.token_ids])).logits[0, -1]
    expected = draws * (logits / temperature).softmax(dim=-1)
    frequent = expected >= 5
    seen = torch.bincount(tokens, minlength=61).float()
    chi_square = ((seen - expected) ** 2 / expected)[frequent].sum()
    cells = int(frequent.sum())
    assert cells > 5
    # Mean `cells`, variance 2 * cells; five deviations leave room for any seed.
    assert chi_square < cells + 5 * (2 * cells) ** 0.5


def test_the_global_generators_stay(tmp_path: Path) -> None:
    directory = save_config("llama", tmp_path)
    model = make_model("llama", seed=1)
    before = torch.get_rng_state()
    engine = build(directory)
    write_weights(engine, model=model, version=0)
    engine.generate(make_prompts(259, lengths=[3]), sampling=SAMPLED, step=0)
    assert torch.equal(before, torch.get_rng_state())


def test_no_prompts_give_an_empty_batch(case: tuple[HfEngine, Any, int]) -> None:
    empty = case[0].generate([], sampling=SAMPLED, step=0)
    assert len(empty) == 0 and empty.response["rollout_logprobs"].dtype == torch.float32


def test_unwritten_weights_are_not_sampled_from(tmp_path: Path) -> None:
    engine = build(save_config("llama", tmp_path))
    with pytest.raises(AssertionError, match="weights_written"):
        engine.generate(make_prompts(259, lengths=[3]), sampling=SAMPLED, step=0)


def test_tensor_parallel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout\.tensor_parallel_size"):
        build_engine(
            "hf",
            model_dir=tmp_path,
            config=RolloutConfig(),
            ranks=(0, 1),
            replica=0,
            group=None,  # type: ignore[arg-type]
            dtype="float32",
            run_seed=0,
            max_model_len=8,
            device=CPU,
        )
