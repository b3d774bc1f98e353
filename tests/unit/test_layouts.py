"""Layouts against plain loops over heads, for every cut of small models with awkward numbers."""

import json
from itertools import product
from pathlib import Path

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

from rlhf_megatron.errors import UserError
from rlhf_megatron.layout import vllm
from rlhf_megatron.layout.architecture import read_architecture
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

CUTS = [(tp, pp) for tp, pp in product((1, 2, 3, 4, 6), (1, 2, 3))]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("head", ["lm", "value"])
def test_megatron_layout_equals_plain_loops_and_gives_everything_back(name, head):
    arch = ARCHITECTURES[name]
    state = random_state(arch, head=head)
    tried = 0
    for (tp, pp), fused in product(CUTS, (False, True)):
        if megatron_problems(arch, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp):
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
            )
            oracle = megatron_oracle(
                arch,
                state=state,
                at=MegatronRank(tp, tp_rank, pp, stage),
                head=head,
                fused_norms=fused,
            )
            shapes = {k: v.shape for k, v in oracle.items()}
            found = place(layout, state=state, shapes=shapes)
            for parameter, expected in oracle.items():
                np.testing.assert_array_equal(found[parameter], expected, err_msg=parameter)
            padded = vocab_parameters()
            assert coverage_problems(layout, shapes=shapes, padded_parameters=padded) == []
            collect(layout, parameters=found, into=back, counts=counts)
        for tensor, expected in state.items():
            np.testing.assert_array_equal(back[tensor], expected)
            whole = "norm" in tensor or tensor == "score.weight"
            copies = tp if whole else 1
            if tensor == "model.embed_tokens.weight" and arch.tie_word_embeddings and pp > 1:
                copies = 2 if head == "lm" else 1
            assert (counts[tensor] == copies).all(), tensor
        tried += 1
    assert tried >= 12


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


def test_logical_tensors_are_those_of_transformers():
    import transformers

    for name, arch in ARCHITECTURES.items():
        config_class = (
            transformers.Qwen2Config if arch.family == "qwen2" else transformers.LlamaConfig
        )
        if arch.family == "qwen2":
            continue  # its config takes no head_dim in the constructor of every version
        config = config_class(
            hidden_size=arch.hidden_size,
            intermediate_size=arch.ffn_hidden_size,
            num_hidden_layers=arch.num_layers,
            num_attention_heads=arch.num_attention_heads,
            num_key_value_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            vocab_size=arch.vocab_size,
            tie_word_embeddings=arch.tie_word_embeddings,
        )
        model = transformers.LlamaForCausalLM(config)
        expected = {k: tuple(v.shape) for k, v in model.state_dict().items()}
        if arch.tie_word_embeddings:
            del expected["lm_head.weight"]
        found = {t.name: t.shape for t in logical_tensors(arch, head="lm")}
        assert found == expected, name


def test_sizes_and_stages():
    assert padded_vocab_size(131, tensor_model_parallel_size=1) == 192
    assert padded_vocab_size(131, tensor_model_parallel_size=3) == 192
    assert padded_vocab_size(131, tensor_model_parallel_size=5) == 320
    assert padded_vocab_size(64, tensor_model_parallel_size=4) == 64
    assert stage_layers(6, pipeline_model_parallel_size=3, stage=1) == range(2, 4)
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
    assert "padded vocabulary 192" in "; ".join(vllm_problems(arch, tensor_parallel_size=5))


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2,
    "hidden_size": 24, "intermediate_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3,
    "vocab_size": 131, "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": 2,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
SCALING = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def read(tmp_path: Path, config: dict, *, generation: dict | None = None):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return read_architecture(tmp_path)


def test_both_spellings_of_rope_are_read(tmp_path):
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}}
    new = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}}
    assert read(tmp_path, old) == read(tmp_path, new)
    arch = read(tmp_path, new, generation={"eos_token_id": [2, 7]})
    assert arch.rope_theta == 5e5
    assert arch.rope_scaling == {"rope_type": "llama3", **SCALING}
    assert arch.eos_token_ids == (2, 7)
    assert (arch.head_dim, arch.dtype, arch.head) == (4, "bfloat16", "lm")
    assert read(tmp_path, LLAMA | {"rope_theta": 1e4, "rope_scaling": None}).rope_scaling is None


def test_smollm2_and_qwen2_fields_are_understood(tmp_path):
    smol = LLAMA | {
        "is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1,
        "transformers.js_config": {"dtype": "q4"}, "attention_bias": False, "_name_or_path": "x",
        "max_length": 4096,
    }  # fmt: skip
    assert read(tmp_path, smol).tie_word_embeddings
    qwen = LLAMA | {
        "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4096,
        "max_window_layers": 2, "layer_types": ["full_attention"] * 2,
    }  # fmt: skip
    assert read(tmp_path, qwen).qkv_bias


def test_a_reward_model_is_read(tmp_path):
    arch = read(
        tmp_path,
        LLAMA | {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
    )
    assert (arch.head, arch.num_labels) == ("classification", 1)


def test_the_audit_lists_all_that_it_does_not_understand(tmp_path):
    bad = LLAMA | {
        "hidden_act": "gelu", "attention_bias": True, "mlp_bias": True, "logit_scale": 2.0,
        "rope_scaling": {"type": "dynamic", "factor": 2.0}, "partial_rotary_factor": 0.5,
        "num_key_value_heads": 4, "quantization_config": {"bits": 4},
        "architectures": ["LlamaModel"],
    }  # fmt: skip
    with pytest.raises(UserError) as caught:
        read(tmp_path, bad)
    for part in (
        "hidden_act: 'gelu'", "attention_bias", "mlp_bias", "logit_scale: 2.0", "'dynamic'",
        "partial_rotary_factor: 0.5", "num_key_value_heads: 4", "quantization_config", "LlamaModel",
    ):  # fmt: skip
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (LLAMA | {"model_type": "mamba"}, "'mamba' is not supported; known: llama, mistral, qwen2, qwen3"),
        (LLAMA | {"hidden_size": 0}, "hidden_size: 0 must be a positive integer"),
        (LLAMA | {"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        (
            LLAMA | {"model_type": "qwen2", "layer_types": ["sliding_attention"]},
            "sliding_attention",
        ),
        (LLAMA | {"rope_parameters": {"rope_type": "llama3"}}, "llama3 needs factor"),
        (LLAMA | {"rope_theta": "x"}, "rope_theta: 'x'"),
    ],
)
def test_single_problems(tmp_path, config, part):
    with pytest.raises(UserError, match=part.replace("(", r"\(")):
        read(tmp_path, config)


def test_a_missing_or_broken_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_architecture(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not readable as JSON"):
        read_architecture(tmp_path)
