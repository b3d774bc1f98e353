"""What a model family states once: the logical tensors in each parameter, and how it is cut.

Every layout (Hugging Face files, Megatron ranks, vLLM ranks) is derived from these rules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlhf_megatron.layout.boxes import LogicalTensor

if TYPE_CHECKING:
    from rlhf_megatron.layout.architecture import ModelArchitecture

Kind = Literal["column", "row", "replicated", "qkv", "gate_up", "vocab"]
"""How tensor parallelism cuts a parameter:

column      rows [out, in] or [out] in equal parts (dimension 0)
row         columns [out, in] in equal parts (dimension 1)
replicated  whole on every rank
qkv         query, key and value together; Megatron-Core interleaves them per KV group, vLLM
            concatenates each rank's shards and replicates KV heads beyond their number
gate_up     gate and up together, each rank its gate shard, then its up shard
vocab       rows in equal parts of a vocabulary padded at its end
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter of the engines and the logical tensors in it.

    Within a layer, names are relative to `model.layers.N.` (Hugging Face and vLLM) and to
    `decoder.layers.N.` (Megatron-Core).
    """

    kind: Kind
    tensors: tuple[LogicalTensor, ...]
    megatron: str
    vllm: str
    groups: int = 1
    """KV heads, of kind "qkv" only."""
    megatron_fused: str = ""
    """Megatron-Core's name where Transformer Engine fuses the norm into the next linear, if it
    differs from `megatron`."""

    def megatron_name(self, *, fused_norms: bool) -> str:
        return self.megatron_fused if fused_norms and self.megatron_fused else self.megatron


@dataclass(frozen=True, slots=True)
class ModelRules:
    """All rules of a language model: `layer` holds for each layer."""

    embedding: Rule
    layer: tuple[Rule, ...]
    final_norm: Rule
    output: Rule


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: `model_type` of config.json, its rules, and what its config may say."""

    name: str
    class_prefix: str
    """Of transformers' classes: "Llama" of LlamaForCausalLM."""
    qkv_bias: bool
    rules: Callable[["ModelArchitecture"], ModelRules]
    audit: Callable[[Mapping[str, Any]], list[str]]
    """Problems with the family's own fields of config.json."""
    fields: frozenset[str]
    """The family's own fields of config.json, which `audit` understands."""
    defaults: Mapping[str, Any]
    """What transformers takes for a field that config.json leaves out."""
    qk_norm: bool = False
    """Root-mean-square norms of each head's query and key, before the rotation."""
    sliding_window: bool = False
    """Whether the field `sliding_window`, where not null, holds for every layer."""


def tensor(name: str, *shape: int) -> LogicalTensor:
    """Short for LogicalTensor, to keep tables of rules readable."""
    return LogicalTensor(name, shape)
