"""Qwen2 and Qwen2.5: Llama's layers with a bias on query, key and value."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_megatron.layout.families import llama
from rlhf_megatron.layout.rules import Family, ModelRules, Rule, tensor

if TYPE_CHECKING:
    from rlhf_megatron.layout.architecture import ModelArchitecture


def rules(arch: "ModelArchitecture") -> ModelRules:
    """Llama's rules and the biases."""
    base = llama.rules(arch)
    kv_rows = arch.num_key_value_heads * arch.head_dim
    bias = Rule(
        "qkv",
        (
            tensor("self_attn.q_proj.bias", arch.num_attention_heads * arch.head_dim),
            tensor("self_attn.k_proj.bias", kv_rows),
            tensor("self_attn.v_proj.bias", kv_rows),
        ),
        groups=arch.num_key_value_heads,
        megatron="self_attention.linear_qkv.bias",
        vllm="self_attn.qkv_proj.bias",
    )
    return replace(base, layer=(*base.layer, bias))


def audit(config: Mapping[str, Any]) -> list[str]:
    """Sliding windows are refused where they are in use: vLLM 0.25 to 0.32 has them on all layers
    or none (models/qwen2.py), transformers from `max_window_layers` on."""
    problems = []
    if config.get("use_mrope"):
        problems.append("use_mrope: true is not supported; only plain rotary positions are")
    if config.get("use_sliding_window"):
        problems.append("use_sliding_window: true is not supported; only full attention is")
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other:
        problems.append(f"layer_types: {other} are not supported; only full_attention is")
    return problems


FAMILY = Family(
    name="qwen2",
    class_prefix="Qwen2",
    qkv_bias=True,
    rules=rules,
    audit=audit,
    fields=frozenset(
        {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "use_mrope"}
    ),
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32},
)
