"""Random models, cut at random, against brute force: who owns which element, and what a resharding
from any cut to any other moves. Every family, virtual stages, awkward numbers."""

from collections import Counter
from itertools import product

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layout_cases import MegatronRank, megatron_oracle, place, random_state, small, vllm_oracle

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.cells import coverage_problems
from rlhf_megatron.layout.families import FAMILIES
from rlhf_megatron.layout.hf import hf_layout
from rlhf_megatron.layout.megatron import (
    megatron_layouts,
    megatron_problems,
    megatron_rank_layout,
    padded_vocab_size,
    vocab_parameters,
)
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.tensors import logical_tensors
from rlhf_megatron.layout.vllm import VOCAB_PARAMETERS, vllm_problems, vllm_rank_layout
from rlhf_megatron.reshard.plan import make_plan

SIZES = st.integers(1, 3)


@st.composite
def cut_models(draw) -> tuple[ModelArchitecture, int, int, int]:
    """A model and tensor, pipeline and virtual pipeline sizes that it can be cut into."""
    family = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    tp, pp = draw(st.integers(1, 4)), draw(SIZES)
    vpp = draw(SIZES) if pp > 1 else 1
    groups = draw(st.sampled_from([1, 2, 3, tp, 2 * tp]))
    heads = groups * draw(SIZES) * (tp if groups % tp else 1)
    arch = small(
        family=family.name,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        num_layers=pp * vpp * draw(SIZES),
        hidden_size=tp * draw(SIZES),
        ffn_hidden_size=tp * draw(SIZES),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=draw(st.integers(1, 5)),
        vocab_size=draw(st.integers(1, 200)),
        tie_word_embeddings=draw(st.booleans()),
    )
    assume(not problems(arch, tp, pp, vpp))
    return arch, tp, pp, vpp


def problems(arch: ModelArchitecture, tp: int, pp: int, vpp: int) -> list[str]:
    return megatron_problems(
        arch,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
    )


@settings(max_examples=60, deadline=None)
@given(cut_models(), st.sampled_from(["lm", "value", "joint"]), st.booleans())
def test_every_element_is_owned_as_often_as_the_layout_says(cut, head, fused):
    arch, tp, pp, vpp = cut
    state = random_state(arch, head=head)
    owners = {name: np.zeros(array.shape, dtype=int) for name, array in state.items()}
    held = 0
    for tp_rank, stage in product(range(tp), range(pp)):
        at = MegatronRank(tp, tp_rank, pp, stage, vpp)
        oracle = megatron_oracle(arch, state=state, at=at, head=head, fused_norms=fused)
        layout = megatron_rank_layout(
            arch,
            tensor_model_parallel_size=tp,
            tp_rank=tp_rank,
            pipeline_model_parallel_size=pp,
            stage=stage,
            head=head,
            fused_norms=fused,
            virtual_pipeline_model_parallel_size=vpp,
        )
        shapes = {name: array.shape for name, array in oracle.items()}
        padded = vocab_parameters(virtual_pipeline_model_parallel_size=vpp)
        assert coverage_problems(layout, shapes=shapes, padded_parameters=padded) == []
        for name, array in place(layout, state=state, shapes=shapes).items():
            np.testing.assert_array_equal(array, oracle[name], err_msg=name)
        for placement in layout:
            owners[placement.tensor][placement.box.slices()] += 1
            held += placement.box.numel
    two_ends = arch.tie_word_embeddings and pp > 1 and head != "value"
    for name, count in owners.items():
        copies = tp if "norm" in name or name == "score.weight" else 1
        copies *= 2 if two_ends and "embed_tokens" in name else 1
        assert (count == copies).all(), name
    assert held == sum(int(count.sum()) for count in owners.values())


@settings(max_examples=40, deadline=None)
@given(cut_models(), st.sampled_from([1, 2, 3, 4, 6]))
def test_a_vllm_rank_holds_what_its_loaders_would_fill_in(cut, size):
    arch = cut[0]
    assume(not vllm_problems(arch, tensor_parallel_size=size))
    state = random_state(arch, head="lm")
    for tp_rank in range(size):
        layout = vllm_rank_layout(arch, tensor_parallel_size=size, tp_rank=tp_rank)
        oracle = vllm_oracle(arch, state=state, tp=size, tp_rank=tp_rank)
        shapes = {name: array.shape for name, array in oracle.items()}
        assert coverage_problems(layout, shapes=shapes, padded_parameters=VOCAB_PARAMETERS) == []
        for name, array in place(layout, state=state, shapes=shapes).items():
            np.testing.assert_array_equal(array, oracle[name], err_msg=name)


LAYOUT_PAIRS = [
    ((1, 1, 1), (2, 2, 1)),
    ((2, 1, 1), (1, 2, 2)),
    ((4, 2, 2), (3, 1, 1)),
    ((3, 2, 1), (2, 3, 2)),
    ((1, 3, 2), (4, 1, 1)),
    ((2, 2, 2), (1, 3, 1)),
    ((3, 1, 1), (1, 2, 1)),
]
"""(tensor, pipeline, virtual pipeline) sizes of source and target."""


def test_round_trips_through_two_layouts_are_bit_equal_in_bf16():
    """HF -> Megatron (a) -> Megatron (b) -> HF, all bit patterns of bf16, NaN among them."""
    tried = Counter()
    for (name, family), tied, (a, b) in product(FAMILIES.items(), (False, True), LAYOUT_PAIRS):
        arch = small(
            family=name, qkv_bias=family.qkv_bias, qk_norm=family.qk_norm, num_layers=12,
            num_key_value_heads=1, head_dim=6, tie_word_embeddings=tied,
        )  # fmt: skip
        assert not problems(arch, *a) and not problems(arch, *b)
        whole = {0: hf_layout(arch, head="lm")}
        original = {0: random_bits(arch)}
        first, second = layouts(arch, *a), layouts(arch, *b)
        there = moved(original, source=whole, target=first)
        across = moved(there, source=first, target=second)
        back = moved(across, source=second, target=whole)
        for tensor, expected in original[0].items():
            assert torch.equal(back[0][tensor].view(torch.int16), expected.view(torch.int16))
        tried[name] += 1
    assert tried == dict.fromkeys(FAMILIES, 2 * len(LAYOUT_PAIRS))


def random_bits(arch: ModelArchitecture) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        t.name: torch.randint(
            -(2**15), 2**15, t.shape, generator=generator, dtype=torch.int16
        ).view(torch.bfloat16)
        for t in logical_tensors(arch, head="lm")
    }


def layouts(arch: ModelArchitecture, tp: int, pp: int, vpp: int) -> dict[int, RankLayout]:
    parallel = ParallelLayout(
        ranks=tuple(range(tp * pp)),
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
    )
    return megatron_layouts(arch, parallel=parallel, head="lm", fused_norms=False)


def moved(held, *, source, target):
    """The target's parameters after the planned copies and transfers."""
    plan = make_plan(source, target, itemsize_bytes=2, bucket_bytes=2000)
    found = {rank: empty(layout) for rank, layout in target.items()}
    for rank, mine in plan.by_rank.items():
        for transfer in (*mine.copies, *(t for bucket in mine.receives for t in bucket)):
            assert transfer.dst == rank
            value = held[transfer.src][transfer.source_parameter][transfer.source_region]
            found[rank][transfer.target_parameter][transfer.target_region] = value
    return found


def empty(layout: RankLayout) -> dict[str, torch.Tensor]:
    """Zeros that just hold all boxes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for p in layout:
        stop = tuple(o + n for o, n in zip(p.offset, p.box.shape, strict=True))
        shapes[p.parameter] = tuple(map(max, shapes.get(p.parameter, (0,) * len(stop)), stop))
    return {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_vocabulary_padding_is_the_least_that_both_sides_can_cut(vocab_size, tp):
    rows = padded_vocab_size(vocab_size, tensor_model_parallel_size=tp)
    assert rows % 64 == rows % tp == 0
    smaller = [n for n in range(vocab_size, rows) if n % 64 == 0 and n % tp == 0]
    assert not smaller
