"""Qwen3: Llama's layers with norms of query and key, and a head_dim of its own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_megatron.layout.families import llama, qwen2
from rlhf_megatron.layout.rules import Family, ModelRules, Rule, tensor

if TYPE_CHECKING:
    from rlhf_megatron.layout.architecture import ModelArchitecture


def rules(arch: "ModelArchitecture") -> ModelRules:
    """Llama's rules and the two norms, [head_dim], which all heads share."""
    base = llama.rules(arch)
    norms = (
        Rule(
            "replicated",
            (tensor(f"self_attn.{which}_norm.weight", arch.head_dim),),
            megatron=f"self_attention.{which}_layernorm.weight",
            vllm=f"self_attn.{which}_norm.weight",
        )
        for which in ("q", "k")
    )
    return replace(base, layer=(*base.layer, *norms))


def audit(config: Mapping[str, Any]) -> list[str]:
    """Problems with biases, and with sliding windows as in Qwen2."""
    problems = qwen2.audit(config)
    if config.get("attention_bias"):
        problems.append("attention_bias: true is not supported for qwen3; only false is")
    return problems


FAMILY = Family(
    name="qwen3",
    class_prefix="Qwen3",
    qkv_bias=False,
    rules=rules,
    audit=audit,
    fields=qwen2.FAMILY.fields | {"attention_bias"},
    defaults={**qwen2.FAMILY.defaults, "head_dim": 128},
    qk_norm=True,
)
