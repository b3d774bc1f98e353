"""Reading and auditing the fields of a Hugging Face config.json. Dictionaries in, problems out."""

from collections.abc import Mapping
from typing import Any, Literal

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
)
"""Required positive integers."""

_UNDERSTOOD = frozenset(
    {
        *SIZES, "model_type", "architectures", "num_key_value_heads", "head_dim", "hidden_act",
        "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
        "tie_word_embeddings", "max_position_embeddings", "quantization_config", "dtype",
        "torch_dtype", "eos_token_id", "bos_token_id", "pad_token_id", "id2label", "label2id",
        "num_labels",
    }
)  # fmt: skip

_NO_EFFECT = frozenset(
    {
        # Bookkeeping, training from scratch, dropout (a PPO policy is trained without), switches of
        # transformers' own outputs, and defaults of its generate().
        "transformers_version", "transformers.js_config", "initializer_range", "use_cache",
        "attention_dropout", "pretraining_tp", "problem_type", "return_dict",
        "chunk_size_feed_forward", "is_encoder_decoder", "model_max_length", "auto_map",
        "tokenizer_class", "unsloth_version", "unsloth_fixed", "finetuning_task", "max_length",
        "max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "repetition_penalty",
        "min_length", "min_new_tokens", "typical_p", "num_beams", "num_beam_groups", "min_p",
        "num_return_sequences", "length_penalty", "diversity_penalty", "no_repeat_ngram_size",
        "early_stopping", "return_dict_in_generate", "bad_words_ids", "suppress_tokens",
        "begin_suppress_tokens", "remove_invalid_values", "max_sequence_length", "sep_token_id",
        "task_specific_params", "prefix", "output_attentions", "output_hidden_states",
        "output_scores", "output_logits",
    }
)  # fmt: skip


def audit_common(config: Mapping[str, Any]) -> list[str]:
    """Problems with the fields that all families share."""
    problems = [
        f"{name}: {config.get(name)!r} must be a positive integer"
        for name in SIZES
        if not _positive(config.get(name))
    ]
    if problems:
        return problems
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    if not _positive(kv_heads) or heads % kv_heads:
        problems.append(
            f"num_key_value_heads: {kv_heads!r} does not divide num_attention_heads {heads}"
        )
    head_dim = config.get("head_dim")
    if head_dim is None and hidden % heads:
        problems.append(
            f"hidden_size: {hidden} is no multiple of num_attention_heads {heads}, and there is no"
            " head_dim"
        )
    if head_dim is not None and not _positive(head_dim):
        problems.append(f"head_dim: {head_dim!r} must be a positive integer")
    if not isinstance(config.get("rms_norm_eps"), float | int):
        problems.append(f"rms_norm_eps: {config.get('rms_norm_eps')!r} must be a number")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        problems.append(f"hidden_act: {config['hidden_act']!r} is not supported; only silu is")
    if config.get("quantization_config"):
        problems.append("quantization_config: quantised weights cannot be trained; dequantise them")
    if head_of(config) == "unknown":
        problems.append(
            f"architectures: {config['architectures']!r} is neither a ...ForCausalLM nor a"
            " ...ForSequenceClassification"
        )
    return problems


def audit_unknown_fields(config: Mapping[str, Any], *, known: frozenset[str]) -> list[str]:
    """A field nobody here understands is refused, unless it is private or says "off"."""
    return [
        f"{name}: {value!r} is not understood; if it does not change the model, remove it from"
        " config.json"
        for name, value in config.items()
        if name not in _UNDERSTOOD | _NO_EFFECT | known and not name.startswith("_") and value
    ]


def head_of(config: Mapping[str, Any]) -> Any:
    """ "lm", "classification" or "unknown", from the class name that config.json gives."""
    names = config.get("architectures")
    if not names:
        return "lm"
    found: dict[str, Literal["lm", "classification"]] = {
        "ForCausalLM": "lm",
        "ForSequenceClassification": "classification",
    }
    for suffix, head in found.items():
        if str(names[0]).endswith(suffix):
            return head
    return "unknown"


def num_labels_of(config: Mapping[str, Any]) -> int:
    """Labels of a classification model; transformers' default is 2."""
    if config.get("id2label"):
        return len(config["id2label"])
    return int(config.get("num_labels") or 2)


def eos_token_ids(config: Mapping[str, Any], *, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """All EOS ids; generation_config.json has precedence, as in transformers' generate."""
    found = generation.get("eos_token_id")
    if found is None:
        found = config.get("eos_token_id")
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
