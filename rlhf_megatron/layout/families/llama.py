"""Llama 1 to 3 and what shares their layers, such as SmolLM2 (`model_type` "llama")."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf_megatron.layout.rules import Family, ModelRules, Rule, tensor

if TYPE_CHECKING:
    from rlhf_megatron.layout.architecture import ModelArchitecture


def rules(arch: "ModelArchitecture") -> ModelRules:
    """The rules of Llama 1 to 3."""
    vocab, hidden, ffn = arch.vocab_size, arch.hidden_size, arch.ffn_hidden_size
    heads = arch.num_attention_heads * arch.head_dim
    kv_heads = arch.num_key_value_heads * arch.head_dim
    layer = (
        Rule(
            "replicated",
            (tensor("input_layernorm.weight", hidden),),
            megatron="input_layernorm.weight",
            megatron_fused="self_attention.linear_qkv.layer_norm_weight",
            vllm="input_layernorm.weight",
        ),
        Rule(
            "qkv",
            (
                tensor("self_attn.q_proj.weight", heads, hidden),
                tensor("self_attn.k_proj.weight", kv_heads, hidden),
                tensor("self_attn.v_proj.weight", kv_heads, hidden),
            ),
            groups=arch.num_key_value_heads,
            megatron="self_attention.linear_qkv.weight",
            vllm="self_attn.qkv_proj.weight",
        ),
        Rule(
            "row",
            (tensor("self_attn.o_proj.weight", hidden, heads),),
            megatron="self_attention.linear_proj.weight",
            vllm="self_attn.o_proj.weight",
        ),
        Rule(
            "replicated",
            (tensor("post_attention_layernorm.weight", hidden),),
            megatron="pre_mlp_layernorm.weight",
            megatron_fused="mlp.linear_fc1.layer_norm_weight",
            vllm="post_attention_layernorm.weight",
        ),
        Rule(
            "gate_up",
            (
                tensor("mlp.gate_proj.weight", ffn, hidden),
                tensor("mlp.up_proj.weight", ffn, hidden),
            ),
            megatron="mlp.linear_fc1.weight",
            vllm="mlp.gate_up_proj.weight",
        ),
        Rule(
            "row",
            (tensor("mlp.down_proj.weight", hidden, ffn),),
            megatron="mlp.linear_fc2.weight",
            vllm="mlp.down_proj.weight",
        ),
    )
    return ModelRules(
        embedding=Rule(
            "vocab",
            (tensor("model.embed_tokens.weight", vocab, hidden),),
            megatron="embedding.word_embeddings.weight",
            vllm="model.embed_tokens.weight",
        ),
        layer=layer,
        final_norm=Rule(
            "replicated",
            (tensor("model.norm.weight", hidden),),
            megatron="decoder.final_layernorm.weight",
            vllm="model.norm.weight",
        ),
        output=Rule(
            "vocab",
            (tensor("lm_head.weight", vocab, hidden),),
            megatron="output_layer.weight",
            vllm="lm_head.weight",
        ),
    )


def audit(config: Mapping[str, Any]) -> list[str]:
    """Problems with `attention_bias`, `mlp_bias` and `rope_interleaved`."""
    return [
        f"{field}: {config[field]!r} is not supported for llama; only false is"
        for field in ("attention_bias", "mlp_bias", "rope_interleaved")
        if config.get(field)
    ]


FAMILY = Family(
    name="llama",
    class_prefix="Llama",
    qkv_bias=False,
    rules=rules,
    audit=audit,
    fields=frozenset({"attention_bias", "mlp_bias", "rope_interleaved", "is_llama_config"}),
    defaults={"max_position_embeddings": 2048},
)
