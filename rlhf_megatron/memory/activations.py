"""Bytes that the forward pass saves for the backward pass, and what the backward pass adds.

The terms follow Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
Models" (arXiv:2205.05198, equations 1 to 5), written out anew for what the layers here save: RMS
norms, rotary embeddings, grouped key-value heads, SwiGLU, flash attention, no dropout.
tests/distributed/test_memory_activations.py counts the saved tensors against them.

Shape letters: T tokens of a micro-batch, S = T / t of them under sequence parallelism, else T;
H hidden size, F feed-forward size / t, Q query width / t, G key-value width / t, t tensor-parallel.
"""

from dataclasses import dataclass
from typing import Literal

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.parallel import ParallelLayout

Recompute = Literal["none", "selective", "full"]
Kernels = Literal["flash", "composite"]
"""flash: fused norms and SwiGLU and variable-length flash attention, a GPU in bf16. composite:
torch's norm in float32 steps and scaled dot product attention over copies, a CPU."""

INDEX_BYTES = 8
FP32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """Widths of one decoder layer on one rank, and the bytes that follow from them."""

    tokens: int
    """T."""
    sharded_tokens: int
    """S."""
    hidden: int
    ffn: int
    query: int
    key_value: int
    head_dim: int
    heads: int
    """Query heads of this rank."""
    key_value_heads: int
    itemsize: int
    """Bytes of an activation."""
    qk_norm: bool
    kernels: Kernels

    @property
    def stream(self) -> int:
        """Bytes of the residual stream, [S, H]."""
        return self.sharded_tokens * self.hidden * self.itemsize

    @property
    def gathered(self) -> int:
        """Bytes of the hidden states of all tokens, [T, H]."""
        return self.tokens * self.hidden * self.itemsize

    def norm(self, tokens: int, width: int) -> int:
        """Saved by a norm over [tokens, width], its output aside."""
        if self.kernels == "flash":
            return tokens * (width * self.itemsize + FP32_BYTES)
        # x and its normalised value in float32, and the inverse root.
        return tokens * FP32_BYTES * (2 * width + 1)

    @property
    def norms(self) -> int:
        found = 2 * self.norm(self.sharded_tokens, self.hidden)
        return found + (self._head_norms if self.qk_norm else 0)

    @property
    def _head_norms(self) -> int:
        """Of query and key. The query is a copy, the key a view of all three together."""
        statistics = self.tokens * (self.heads + self.key_value_heads) * FP32_BYTES
        if self.kernels == "flash":  # the value keeps all three together as well
            return self.tokens * self.query * self.itemsize + statistics
        widths = self.query + self.key_value
        inputs = widths if self.itemsize < FP32_BYTES else 2 * widths
        return self.tokens * FP32_BYTES * (inputs + widths) + statistics

    @property
    def angles(self) -> int:
        """Cosines and sines, one set for all layers."""
        return self.tokens * self.head_dim * self.itemsize

    @property
    def attention(self) -> int:
        """Saved by the core attention and by the projection after it."""
        width = self.query + 2 * self.key_value
        statistics = self.tokens * self.heads * FP32_BYTES
        if self.kernels == "flash":
            return self._attention_inputs + self._core_output + statistics
        # Copies of query, key and value, the output, and its copy in the order of the tokens.
        return self.tokens * self.itemsize * (width + self.query) + statistics + self._core_output

    @property
    def _attention_inputs(self) -> int:
        """Rotated query and key, and the whole [Q + 2G] of which the value is a view."""
        widths = self.query + self.key_value + self.query + 2 * self.key_value
        return self.tokens * self.itemsize * widths

    @property
    def _core_output(self) -> int:
        return self.tokens * self.itemsize * self.query

    @property
    def mlp(self) -> int:
        """Gate and up together, and their product; where it is not fused, also silu(gate), and up
        + 0 (Megatron-Core adds glu_linear_offset into a new tensor)."""
        widths = 3 if self.kernels == "flash" else 5
        return widths * self.tokens * self.ffn * self.itemsize

    def saved(self, recompute: Recompute) -> int:
        """Bytes kept from this layer's forward pass to its backward pass."""
        if recompute == "full":
            return self.stream
        core = self.attention
        if recompute == "selective":
            core = self._attention_inputs + self._core_output
        return self.norms + 2 * self.stream + core + self.mlp

    @property
    def recomputed(self) -> int:
        """Bytes that come back while the backward pass of a layer runs that is recomputed whole:
        what it saves, and its output."""
        # The first norm saves the layer's input, which is kept already, unless it copies it.
        is_shared = self.kernels == "flash" or self.itemsize == FP32_BYTES
        return self.saved("none") + (0 if is_shared else self.stream)

    @property
    def forward_workspace(self) -> int:
        """The most beside the layer's input while it runs forward without gradients: residual, norm
        and its output, and the SwiGLU's arrays."""
        return 3 * self.stream + self.mlp

    @property
    def backward_workspace(self) -> int:
        """The most beside the saved tensors while a layer runs backward: the gradients of the
        SwiGLU's factors and product, when the product itself is free again; or the weight gradient
        of gate and up, on its way into its buffer."""
        factors = 2 * self.tokens * self.ffn * self.itemsize
        weight = 2 * self.ffn * self.hidden * self.itemsize + self.gathered + self._gathered_copy
        return self.stream + max(factors, weight - factors // 2)

    @property
    def _gathered_copy(self) -> int:
        """Sequence parallelism gathers the tokens before each column-parallel matrix."""
        return self.gathered if self.sharded_tokens < self.tokens else 0


def layer_activations(
    arch: ModelArchitecture,
    *,
    layout: ParallelLayout,
    tokens: int,
    itemsize: int,
    kernels: Kernels,
) -> LayerActivations:
    """The widths of a rank of `layout` for micro-batches of `tokens` tokens."""
    tp = layout.tensor_model_parallel_size
    sharded = layout.sequence_parallel and tp > 1
    padded = -(-tokens // tp) * tp if sharded else tokens
    key_value_heads = max(1, arch.num_key_value_heads // tp)
    return LayerActivations(
        tokens=padded,
        sharded_tokens=padded // tp if sharded else padded,
        hidden=arch.hidden_size,
        ffn=arch.ffn_hidden_size // tp,
        query=arch.num_attention_heads * arch.head_dim // tp,
        key_value=key_value_heads * arch.head_dim,
        head_dim=arch.head_dim,
        heads=arch.num_attention_heads // tp,
        key_value_heads=key_value_heads,
        itemsize=itemsize,
        qk_norm=arch.qk_norm,
        kernels=kernels,
    )


def in_flight(layout: ParallelLayout, *, stage: int, num_micro_batches: int) -> float:
    """Forward passes of this stage that wait for their backward pass, at most, in whole stages.

    1F1B (arXiv:2104.04473, section 2.2): stage p of P holds P - p micro-batches. Interleaved with
    v chunks: 2 (P - p - 1) + (v - 1) P + 1 passes through one of v chunks.
    """
    stages = layout.pipeline_model_parallel_size
    virtual = layout.virtual_pipeline_model_parallel_size
    if virtual == 1:
        return min(stages - stage, num_micro_batches)
    rounded = -(-num_micro_batches // stages) * stages
    warm_up = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
    return min(warm_up, rounded * virtual) / virtual
