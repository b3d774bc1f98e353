"""Mini-batches cut to replicas and micro-batches, and what these hold, against plain loops."""

import random
from collections.abc import Sequence
from math import log
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.engine.microbatch import (
    equal_micro_batches,
    make_micro_batch,
    padding_tokens,
)
from rlhf_megatron.engine.transfer import to_device
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.micro_batches import Packing, pack_samples, packing_metrics

CPU = torch.device("cpu")
FIELDS = ("old_logprobs", "loss_mask")
ARCH = ModelArchitecture(
    family="llama",
    num_layers=16,
    hidden_size=2048,
    ffn_hidden_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=128256,
    tie_word_embeddings=True,
)
BUDGET_TOKENS = 16384


def engine_of(
    *, dp: int = 1, pp: int = 1, vpp: int = 1, pad_to_multiple: int = 1, head: str = "lm"
) -> Any:
    layout = ParallelLayout(
        tuple(range(dp * pp)),
        pipeline_model_parallel_size=pp,
        data_parallel_size=dp,
        virtual_pipeline_model_parallel_size=vpp,
    )
    model = SimpleNamespace(arch=ARCH, head=head, groups=SimpleNamespace(layout=layout))
    return SimpleNamespace(model=model, pad_to_multiple=pad_to_multiple, device=CPU)


def batch_of(prompts: Sequence[int], *, responses: Sequence[int]) -> RaggedBatch:
    """Token and field values tell where they stand."""
    num_tokens, num_response_tokens = sum(prompts) + sum(responses), sum(responses)
    numbers = torch.arange(num_response_tokens)
    return RaggedBatch(
        tokens=torch.arange(num_tokens) + 1000,
        prompt_lengths=torch.tensor(prompts),
        response_lengths=torch.tensor(responses),
        response={
            "old_logprobs": -numbers.float(),
            "loss_mask": numbers % 2,
            "unused": numbers.double(),
        },
    )


def realistic_batch(num_samples: int, *, seed: int) -> RaggedBatch:
    """Prompts and responses of at most 1024 tokens, most of them of a few hundred."""
    generator = random.Random(seed)

    def lengths(median: int, spread: float) -> list[int]:
        drawn = (generator.lognormvariate(log(median), spread) for _ in range(num_samples))
        return [min(max(int(length), 16), 1024) for length in drawn]

    return batch_of(lengths(250, 0.7), responses=lengths(400, 0.8))


def loads(packing: Packing, values: Sequence[int]) -> list[list[int]]:
    """Of each replica's micro-batches."""
    return [[sum(values[i] for i in pack) for pack in packs] for packs in packing.samples]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("samples", "dp", "pp", "vpp"), [(256, 1, 1, 1), (256, 8, 1, 1), (1024, 4, 4, 2)], ids=str
)
def test_realistic_lengths_leave_little_uneven(samples, dp, pp, vpp, seed):
    batch = realistic_batch(samples, seed=seed)
    engine = engine_of(dp=dp, pp=pp, vpp=vpp, pad_to_multiple=8)
    packing = pack_samples(
        engine, batch=batch, samples=range(samples), micro_batch_tokens=BUDGET_TOKENS
    )
    tokens = loads(packing, batch.lengths.tolist())
    flat = [n for counts in tokens for n in counts]
    assert max(flat) <= BUDGET_TOKENS and max(flat) < 1.05 * sum(flat) / len(flat)
    assert len({len(packs) for packs in packing.samples}) == 1
    assert vpp == 1 or len(packing.samples[0]) % pp == 0
    figures = packing.figures
    assert figures.token_imbalance == pytest.approx(max(flat) * len(flat) / sum(flat) - 1)
    assert figures.tokens == batch.num_tokens
    assert 0 <= figures.padding_tokens < 0.02 * batch.num_tokens


def test_replicas_get_equal_cost_and_not_equal_tokens():
    """One long sequence costs more than three of half its length."""
    long, short = 100_000, 50_000
    batch = batch_of([1] * 5, responses=[long - 1] + [short - 1] * 4)
    engine = engine_of(dp=2)
    packing = pack_samples(engine, batch=batch, samples=range(5), micro_batch_tokens=10**6)
    # FLOPs by hand: 2 a parameter, and 2 s^2 heads head_dim a layer.
    matrices = 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192) + 2048 * 128256
    cost = {s: 2 * matrices * s + 16 * 2 * s * s * 2048 for s in (long, short)}
    lengths = batch.lengths.tolist()
    (first, second) = ([i for pack in packs for i in pack] for packs in packing.samples)
    assert (first, second) == ([0], [1, 2, 3, 4])  # 100,000 tokens and 200,000
    costs = [sum(cost[lengths[i]] for i in part) for part in (first, second)]
    assert packing.figures.cost_imbalance == pytest.approx(max(costs) / (sum(costs) / 2) - 1)
    assert packing.figures.cost_imbalance < 0.2


def test_the_computed_tokens_are_those_of_the_micro_batches():
    batch = realistic_batch(40, seed=1)
    samples = list(range(3, 30))
    for engine in (
        engine_of(dp=2, pad_to_multiple=8),
        engine_of(pp=4, vpp=2, pad_to_multiple=2),
        engine_of(dp=3, pp=2, vpp=3),
    ):
        packing = pack_samples(engine, batch=batch, samples=samples, micro_batch_tokens=4000)
        layout = engine.model.groups.layout
        computed = 0
        for packs in packing.samples:
            micros = [
                make_micro_batch(
                    batch,
                    samples=pack,
                    fields=(),
                    pad_to_multiple=engine.pad_to_multiple,
                    device=CPU,
                )
                for pack in packs
            ]
            if layout.virtual_pipeline_model_parallel_size > 1:
                stages = layout.pipeline_model_parallel_size
                micros = equal_micro_batches(micros, number_multiple=stages)
                assert len(micros) == len(packs)
            computed += sum(micro.tokens.size(1) for micro in micros)
        assert sorted(i for packs in packing.samples for pack in packs for i in pack) == samples
        figures = packing.figures
        assert figures.tokens == int(batch.lengths[samples].sum())
        assert figures.tokens + figures.padding_tokens == computed


def test_actor_and_reference_are_cut_alike_and_a_critic_by_its_own_cost():
    batch = realistic_batch(64, seed=2)
    by_head = {
        head: pack_samples(
            engine_of(dp=4, head=head), batch=batch, samples=range(64), micro_batch_tokens=8000
        )
        for head in ("lm", "joint", "value")
    }
    assert by_head["lm"] == by_head["joint"]
    assert by_head["value"].figures.tokens == by_head["lm"].figures.tokens


def test_the_metrics_of_a_step():
    def figures(tokens: int, padding: int, token_imbalance: float, cost_imbalance: float) -> Any:
        return SimpleNamespace(
            tokens=tokens,
            padding_tokens=padding,
            token_imbalance=token_imbalance,
            cost_imbalance=cost_imbalance,
        )

    found = packing_metrics([figures(90, 10, 0.1, 0.3), figures(300, 0, 0.2, 0.1)], role="actor")
    assert found == {
        "padding_fraction/actor": 10 / 400,
        "token_imbalance/actor": 0.2,
        "cost_imbalance/actor": 0.3,
    }
    assert packing_metrics([], role="critic") == {}


@pytest.mark.parametrize("pad_to_multiple", [1, 8])
@pytest.mark.parametrize("samples", [[2, 0], [1], [3], []], ids=str)
def test_a_micro_batch_holds_its_samples(samples, pad_to_multiple):
    prompts, responses = [2, 3, 1, 4], [3, 1, 2, 0]
    batch = batch_of(prompts, responses=responses)
    micro = make_micro_batch(
        batch, samples=samples, fields=FIELDS, pad_to_multiple=pad_to_multiple, device=CPU
    )
    tokens: list[int] = []
    expected: dict[str, list[float]] = {
        name: [] for name in ("states", "targets", "last", "rows", "positions", *FIELDS)
    }
    ends = [0]
    for i in samples:
        begin = sum(prompts[:i]) + sum(responses[:i])
        first_row = sum(responses[:i])
        for t in range(responses[i]):
            expected["states"].append(len(tokens) + prompts[i] + t - 1)
            expected["targets"].append(1000 + begin + prompts[i] + t)
            expected["rows"].append(first_row + t)
            expected["old_logprobs"].append(-first_row - t)
            expected["loss_mask"].append((first_row + t) % 2)
        length = prompts[i] + responses[i]
        tokens += range(1000 + begin, 1000 + begin + length)
        expected["positions"] += range(length)
        expected["last"].append(len(tokens) - 1)
        ends.append(len(tokens))
    padding = -len(tokens) % pad_to_multiple or (0 if tokens else pad_to_multiple)
    assert padding_tokens(len(tokens), pad_to_multiple=pad_to_multiple) == padding
    assert micro.tokens.tolist() == [[*tokens, *[0] * padding]]
    lengths = [prompts[i] + responses[i] for i in samples]
    assert micro.packed.lengths == (*lengths, *[padding] * bool(padding))
    assert micro.packed.position_ids is not None
    assert micro.packed.position_ids.tolist() == [*expected["positions"], *range(padding)]
    wanted_ends = [*ends, len(tokens) + padding] if padding else ends
    assert micro.packed.cu_seqlens_q.tolist() == wanted_ends
    assert micro.packed.cu_seqlens_kv.dtype == torch.int32
    assert micro.packed.max_seqlen_q == max(micro.packed.lengths)
    assert micro.state_indices.tolist() == expected["states"]
    assert micro.targets.tolist() == expected["targets"]
    assert micro.last_indices.tolist() == expected["last"]
    assert micro.response_lengths.tolist() == [responses[i] for i in samples]
    assert micro.response_rows.tolist() == expected["rows"]
    assert micro.sample_rows.tolist() == samples
    assert {name: values.tolist() for name, values in micro.fields.items()} == {
        name: expected[name] for name in FIELDS
    }


def test_tensors_move_together_as_they_are():
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0, dtype=torch.int64),
        "matrix": torch.arange(6, dtype=torch.float64).view(2, 3),
        "every_second": torch.arange(10, dtype=torch.int32)[::2],
        "number": torch.tensor(2.5, dtype=torch.bfloat16),
    }
    moved = to_device(tensors, device=CPU)
    assert list(moved) == list(tensors)
    for name, tensor in tensors.items():
        assert moved[name].dtype == tensor.dtype and moved[name].shape == tensor.shape
        assert torch.equal(moved[name], tensor)
    storages = {t.untyped_storage().data_ptr() for t in moved.values() if t.numel()}
    assert len(storages) == 1
    assert to_device({}, device=CPU) == {}
