"""The logical tensors of a model, in the order of its layers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import LogicalTensor
from rlhf_megatron.layout.rules import Rule

Head = Literal["lm", "value", "joint"]
"""What a model ends in: the output layer, a scalar head in its place, or both side by side."""
VALUE_HEAD = "score.weight"
"""Logical name of the scalar head, [1, hidden], as in transformers' sequence classification."""


def logical_tensors(arch: ModelArchitecture, *, head: Head) -> list[LogicalTensor]:
    """Names and shapes as Hugging Face stores them.

    A tied language model has no `lm_head.weight`; a value model has `score.weight` [1, hidden] in
    its place, a joint one beside it.
    """
    rules = arch.rules
    found = list(rules.embedding.tensors)
    for layer in range(arch.num_layers):
        for rule in rules.layer:
            found += in_layer(rule, layer=layer).tensors
    found += rules.final_norm.tensors
    if head != "value" and not arch.tie_word_embeddings:
        found += rules.output.tensors
    if head != "lm":
        found.append(LogicalTensor(VALUE_HEAD, (1, arch.hidden_size)))
    return found


def in_layer(rule: Rule, *, layer: int) -> Rule:
    """The rule with its logical names made those of one layer (global number)."""
    prefix = f"model.layers.{layer}."
    return replace(
        rule, tensors=tuple(LogicalTensor(prefix + t.name, t.shape) for t in rule.tensors)
    )


def vocab_tensors(arch: ModelArchitecture) -> Iterator[str]:
    """Names of the logical tensors with one row per token of the vocabulary."""
    for rule in (arch.rules.embedding, arch.rules.output):
        yield from (t.name for t in rule.tensors)
