"""Mistral: Llama's layers, with a sliding window over the keys where the config has one."""

from collections.abc import Mapping
from typing import Any

from rlhf_megatron.layout.families import llama
from rlhf_megatron.layout.rules import Family


def audit(config: Mapping[str, Any]) -> list[str]:
    """Problems with `sliding_window` and with `layer_types` that say otherwise."""
    problems = []
    window = config.get("sliding_window")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        problems.append(f"sliding_window: {window!r} must be a positive integer or null")
    elif window is not None and window < 1:
        problems.append(f"sliding_window: {window} must be a positive integer or null")
    kind = "full_attention" if window is None else "sliding_attention"
    other = sorted(set(config.get("layer_types") or ()) - {kind})
    if other:
        problems.append(
            f"layer_types: {other} are not supported with sliding_window {window}; only {kind} is"
        )
    return problems


FAMILY = Family(
    name="mistral",
    class_prefix="Mistral",
    qkv_bias=False,
    rules=llama.rules,
    audit=audit,
    fields=frozenset({"sliding_window", "layer_types"}),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    sliding_window=True,
)
