"""Layouts against plain loops over heads, for every cut of small models with awkward numbers."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from layout_cases import (
    ARCHITECTURES,
    MegatronRank,
    collect,
    megatron_oracle,
    place,
    random_state,
    small,
    vllm_oracle,
)

from rlhf_megatron.layout import vllm
from rlhf_megatron.layout.cells import coverage_problems
from rlhf_megatron.layout.hf import hf_layout
from rlhf_megatron.layout.megatron import (
    megatron_layouts,
    megatron_problems,
    megatron_rank_layout,
    padded_vocab_size,
    stage_layers,
    vocab_parameters,
)
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.tensors import logical_tensors
from rlhf_megatron.layout.vllm import vllm_problems, vllm_rank_layout

CUTS = list(product((1, 2, 3, 4, 6), (1, 2, 3), (1, 2, 3)))
"""Tensor, pipeline and virtual pipeline sizes."""


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("head", ["lm", "value", "joint"])
def test_megatron_layout_equals_plain_loops_and_gives_everything_back(name, head):
    arch = ARCHITECTURES[name]
    state = random_state(arch, head=head)
    tried = 0
    for (tp, pp, vpp), fused in product(CUTS, (False, True)):
        if megatron_problems(
            arch,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
        ):
            continue
        back = {k: np.zeros_like(v) for k, v in state.items()}
        counts = {k: np.zeros_like(v) for k, v in state.items()}
        for tp_rank, stage in product(range(tp), range(pp)):
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
            oracle = megatron_oracle(
                arch,
                state=state,
                at=MegatronRank(tp, tp_rank, pp, stage, vpp),
                head=head,
                fused_norms=fused,
            )
            shapes = {k: v.shape for k, v in oracle.items()}
            found = place(layout, state=state, shapes=shapes)
            for parameter, expected in oracle.items():
                np.testing.assert_array_equal(found[parameter], expected, err_msg=parameter)
            padded = vocab_parameters(virtual_pipeline_model_parallel_size=vpp)
            assert coverage_problems(layout, shapes=shapes, padded_parameters=padded) == []
            collect(layout, parameters=found, into=back, counts=counts)
        for tensor, expected in state.items():
            np.testing.assert_array_equal(back[tensor], expected)
            whole = "norm" in tensor or tensor == "score.weight"
            copies = tp if whole else 1
            if tensor == "model.embed_tokens.weight" and arch.tie_word_embeddings and pp > 1:
                copies = 2 if head != "value" else 1
            assert (counts[tensor] == copies).all(), tensor
        tried += 1
    assert tried >= 10


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vllm_layout_equals_plain_loops(name):
    arch = ARCHITECTURES[name]
    state = random_state(arch, head="lm")
    tried = 0
    for tp in (1, 2, 3, 4, 6, 12):
        if vllm_problems(arch, tensor_parallel_size=tp):
            continue
        for tp_rank in range(tp):
            layout = vllm_rank_layout(arch, tensor_parallel_size=tp, tp_rank=tp_rank)
            oracle = vllm_oracle(arch, state=state, tp=tp, tp_rank=tp_rank)
            shapes = {k: v.shape for k, v in oracle.items()}
            found = place(layout, state=state, shapes=shapes)
            for parameter, expected in oracle.items():
                np.testing.assert_array_equal(found[parameter], expected, err_msg=parameter)
            padded = vllm.VOCAB_PARAMETERS
            assert coverage_problems(layout, shapes=shapes, padded_parameters=padded) == []
        tried += 1
    assert tried >= 1


def test_a_shard_of_padding_alone_has_no_box_and_is_covered():
    arch = small(vocab_size=65)
    layout = vllm_rank_layout(arch, tensor_parallel_size=4, tp_rank=3)
    assert all(p.parameter != "lm_head.weight" for p in layout)
    shapes = {"lm_head.weight": (32, 24)}
    only = tuple(p for p in layout if p.parameter in shapes)
    assert coverage_problems(only, shapes=shapes, padded_parameters=vllm.VOCAB_PARAMETERS) == []


def test_coverage_names_gaps_overlaps_and_strangers():
    arch = small()
    layout = hf_layout(arch, head="lm")
    shapes = {t.name: t.shape for t in logical_tensors(arch, head="lm")}
    assert coverage_problems(layout, shapes=shapes, padded_parameters=()) == []
    assert coverage_problems(layout[1:], shapes=shapes, padded_parameters=()) == [
        "model.embed_tokens.weight: 3144 of 3144 elements are not covered"
    ]
    assert coverage_problems((layout[0], *layout), shapes=shapes, padded_parameters=()) == [
        "model.embed_tokens.weight: 3144 elements are covered more than once"
    ]
    del shapes["lm_head.weight"]
    assert coverage_problems(layout, shapes=shapes, padded_parameters=()) == [
        "lm_head.weight: in the layout, but not a parameter"
    ]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logical_tensors_are_those_of_transformers(name):
    import torch
    import transformers

    arch = replace(ARCHITECTURES[name], hidden_size=48)  # Qwen2's head_dim is hidden / heads
    prefix = arch.family_definition.class_prefix
    config = getattr(transformers, f"{prefix}Config")(
        hidden_size=arch.hidden_size,
        intermediate_size=arch.ffn_hidden_size,
        num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_attention_heads,
        num_key_value_heads=arch.num_key_value_heads,
        head_dim=arch.head_dim,
        vocab_size=arch.vocab_size,
        tie_word_embeddings=arch.tie_word_embeddings,
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    expected = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    if arch.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert {t.name: t.shape for t in logical_tensors(arch, head="lm")} == expected


def test_sizes_and_stages():
    assert padded_vocab_size(131, tensor_model_parallel_size=1) == 192
    assert padded_vocab_size(131, tensor_model_parallel_size=3) == 192
    assert padded_vocab_size(131, tensor_model_parallel_size=5) == 320
    assert padded_vocab_size(64, tensor_model_parallel_size=4) == 64
    assert stage_layers(6, pipeline_model_parallel_size=3, stage=1) == range(2, 4)
    assert [
        stage_layers(
            12,
            pipeline_model_parallel_size=3,
            stage=1,
            virtual_pipeline_model_parallel_size=2,
            chunk=chunk,
        )
        for chunk in range(2)
    ] == [range(2, 4), range(8, 10)]
    parallel = ParallelLayout(
        ranks=(0, 1, 2, 3, 6, 7, 8, 9),
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        data_parallel_size=2,
    )
    layouts = megatron_layouts(small(), parallel=parallel, head="lm", fused_norms=False)
    assert layouts[0] is layouts[2] and layouts[6] is layouts[8] and layouts[0] is not layouts[6]


def test_cuts_that_do_not_divide_are_named():
    arch = small(num_key_value_heads=3)
    found = "; ".join(
        megatron_problems(arch, tensor_model_parallel_size=5, pipeline_model_parallel_size=4)
    )
    for part in ("attention heads 12", "feed-forward size 36", "KV heads 3", "layers 6"):
        assert part in found
    for pp, vpp, part in ((1, 2, "needs a pipeline"), (2, 2, "size 2 x virtual pipeline size 2")):
        (problem,) = megatron_problems(
            arch,
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
        )
        assert part in problem
    assert "padded vocabulary 192" in "; ".join(vllm_problems(arch, tensor_parallel_size=5))
