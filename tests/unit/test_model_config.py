"""What is read of a config.json, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import transformers

from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.layout.families import FAMILIES

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
        (
            LLAMA | {"model_type": "mamba"},
            "'mamba' is not supported; known: llama, mistral, qwen2, qwen3",
        ),
        (LLAMA | {"hidden_size": 0}, "hidden_size: 0 must be a positive integer"),
        (LLAMA | {"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        (
            LLAMA | {"model_type": "qwen2", "layer_types": ["sliding_attention"]},
            "sliding_attention",
        ),
        (LLAMA | {"rope_parameters": {"rope_type": "llama3"}}, "llama3 needs factor"),
        (LLAMA | {"rope_theta": "x"}, "rope_theta: 'x'"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "linear needs factor"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0}}, "factor 0 must be a positive"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}}, "mscale 1 is not"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2}}, "sequence length, and vLLM"),
        (
            LLAMA
            | {"rope_scaling": {"type": "linear", "factor": 2}}
            | {"rope_parameters": {"rope_type": "default"}},
            "contradicts rope_parameters",
        ),
        (LLAMA | {"model_type": "mistral", "sliding_window": 0}, "sliding_window: 0 must"),
        (
            LLAMA | {"model_type": "mistral", "layer_types": ["full_attention"] * 2},
            "layer_types: ['full_attention'] are not supported with sliding_window 4096",
        ),
        (LLAMA | {"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window"),
        (LLAMA | {"model_type": "qwen2", "use_mrope": True}, "use_mrope"),
    ],
)
def test_single_problems(tmp_path, config, part):
    with pytest.raises(UserError, match=re.escape(part)):
        read(tmp_path, config)


def test_a_missing_or_broken_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_architecture(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not readable as JSON"):
        read_architecture(tmp_path)


# As published, without the fields of the common block; transformers 4 spells rope_theta and
# torch_dtype, 5 rope_parameters and dtype.
COMMON = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 131, "hidden_act": "silu", "initializer_range": 0.02,
    "use_cache": True, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
PUBLISHED = {
    "llama_1": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-06,
        "max_sequence_length": 2048, "torch_dtype": "float16", "pad_token_id": 0,
    },
    "llama_3_1": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-05,
        "attention_bias": False, "mlp_bias": False, "max_position_embeddings": 131072,
        "pretraining_tp": 1, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
        "rope_scaling": {**SCALING, "rope_type": "llama3"}, "eos_token_id": [2, 8, 9],
    },
    "mistral_v0_1": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "rms_norm_eps": 1e-05,
        "max_position_embeddings": 32768, "rope_theta": 10000.0, "sliding_window": 4096,
        "torch_dtype": "bfloat16",
    },
    "mistral_nemo": {
        "model_type": "mistral", "architectures": ["MistralForCausalLM"], "rms_norm_eps": 1e-05,
        "head_dim": 16, "max_position_embeddings": 131072, "sliding_window": None,
        "dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "qwen2_5": {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-06,
        "max_position_embeddings": 32768, "max_window_layers": 21, "rope_theta": 1000000.0,
        "sliding_window": 32768, "use_sliding_window": False, "use_mrope": False,
        "torch_dtype": "bfloat16", "tie_word_embeddings": True,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "qwen3": {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-06,
        "attention_bias": False, "head_dim": 16, "max_position_embeddings": 40960,
        "max_window_layers": 36, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "use_sliding_window": False, "dtype": "bfloat16",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_mean_what_transformers_makes_of_them(tmp_path, name):
    arch = read(tmp_path, COMMON | PUBLISHED[name])
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert arch.num_key_value_heads == theirs.num_key_value_heads
    assert arch.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert arch.rms_norm_eps == theirs.rms_norm_eps
    assert arch.rope_theta == theirs.rope_parameters["rope_theta"]
    kind = theirs.rope_parameters["rope_type"]
    assert (arch.rope_scaling or {"rope_type": "default"})["rope_type"] == kind
    assert arch.sliding_window == (theirs.sliding_window if "mistral" in name else None)
    assert arch.max_position_embeddings == theirs.max_position_embeddings
    assert arch.tie_word_embeddings == theirs.tie_word_embeddings
    assert arch.qk_norm == (name == "qwen3") and arch.qkv_bias == (name == "qwen2_5")


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    "strange",
    [
        {"logit_softcapping": 30.0}, {"attention_multiplier": 0.1}, {"output_multiplier": 2},
        {"num_experts": 4}, {"partial_rotary_factor": 0.5},
        {"dual_chunk_attention_config": {"a": 1}},
        {"llama_4_scaling": {"beta": 0.1}}, {"original_max_position_embeddings": 64},
        {"hidden_act": "gelu_pytorch_tanh"}, {"attention_bias": True}, {"pruned_heads": {"0": [1]}},
        {"layer_types": ["chunked_attention"] * 4}, {"rope_scaling": {"type": "longrope"}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None},
    ],
    ids=lambda strange: next(iter(strange)),
)  # fmt: skip
def test_a_field_that_would_not_be_honoured_is_refused(tmp_path, name, strange):
    with pytest.raises(UserError, match=next(iter(strange))):
        read(tmp_path, COMMON | PUBLISHED[name] | strange)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_transformers_config_classes_is_known(tmp_path, family):
    """Also those with another value than the default, and what is left out has their defaults."""
    prefix = FAMILIES[family].class_prefix
    config = getattr(transformers, f"{prefix}Config")(**COMMON)
    config.architectures = [f"{prefix}ForCausalLM"]
    written = config.to_dict()
    full = read(tmp_path, written)
    left_out = {k: v for k, v in written.items() if k not in FAMILIES[family].defaults}
    assert read(tmp_path, {"num_key_value_heads": 2} | left_out) == full
    for name, value in FAMILIES[family].defaults.items():
        assert getattr(type(config)(), name) == value
    used = {**written, "use_cache": False, "initializer_range": 0.5, "attention_dropout": 0.1}
    assert read(tmp_path, used) == full


def test_a_family_is_one_small_file_that_nothing_else_names():
    from rlhf_megatron.layout import families

    folder = Path(families.__file__).parent
    files = {path.stem: path.read_text() for path in folder.glob("[a-z]*.py")}
    assert files.keys() == FAMILIES.keys()
    assert all(len(text.splitlines()) < 120 for text in files.values())
    others = [p for p in folder.parents[1].rglob("*.py") if folder not in p.parents]
    for path in others:
        names = [f'"{name}"' for name in FAMILIES if f'"{name}"' in path.read_text()]
        assert not names, f"{path} decides by the names {names}"
