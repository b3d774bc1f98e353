"""What a model's ends need: embedding, final norm, value head, and log-probs from hidden states.

The log-probs are those of models/vocab_parallel.py: forward in chunks of tokens, backward in chunks
of the vocabulary. Shape letters: R response tokens of a micro-batch, V vocabulary rows of a rank,
H hidden size.
"""

from dataclasses import dataclass

from rlhf_megatron.memory.activations import (
    FP32_BYTES,
    INDEX_BYTES,
    Kernels,
    LayerActivations,
)

LOGITS_CHUNK_BYTES: dict[Kernels, int] = {"composite": 1 << 27, "flash": 1 << 29}
"""models.vocab_parallel.CHUNK_BYTES, of one float32 array of a chunk of logits, and
GPU_CHUNK_BYTES, of one in the model's dtype."""


@dataclass(frozen=True, kw_only=True)
class HeadMemory:
    """Bytes at the ends of the model, on the ranks that have them."""

    saved: int
    """Saved for the backward pass of each micro-batch in flight on the last stage."""
    loss_saved: int
    """Saved by the loss, of one micro-batch."""
    forward: int
    """Workspace without gradients."""
    backward: int
    """Workspace of the loss's backward pass."""


def embedding_saved(layer: LayerActivations) -> int:
    """Token ids, on the first stage."""
    return layer.tokens * INDEX_BYTES


def packing_saved(layer: LayerActivations) -> int:
    """Two orders of the tokens, which the composite attention keeps for all layers."""
    return 2 * layer.tokens * INDEX_BYTES if layer.kernels == "composite" else 0


def value_head(layer: LayerActivations) -> HeadMemory:
    """Final norm, and the hidden states in float32."""
    wide = layer.sharded_tokens * layer.hidden * FP32_BYTES
    return HeadMemory(
        saved=layer.norm(layer.sharded_tokens, layer.hidden) + wide,
        loss_saved=0,
        forward=layer.stream + wide,
        backward=2 * wide,
    )


def policy_head(
    layer: LayerActivations,
    *,
    response_tokens: int,
    vocabulary_rows: int,
    kept_logits_bytes: int = 0,
) -> HeadMemory:
    """Final norm, hidden states of the response tokens, and a chunk of the log-probs."""
    itemsize, hidden = layer.itemsize, layer.hidden
    fused = layer.kernels == "flash"
    logits = response_tokens * vocabulary_rows * itemsize
    chunk = min(
        LOGITS_CHUNK_BYTES[layer.kernels],
        logits if fused else response_tokens * vocabulary_rows * FP32_BYTES,
    )
    rows = response_tokens * hidden * itemsize
    # Fewer response tokens than these have logits that may be kept.
    kept = min(kept_logits_bytes, logits)
    # The gradient of the hidden states adds up in float32, the weight's is written in its dtype.
    weight = vocabulary_rows * hidden * itemsize
    gradients = response_tokens * hidden * FP32_BYTES + weight
    products = max(2 * chunk, (chunk if fused else chunk * itemsize // FP32_BYTES) + rows)
    of_kept = kept + max(chunk, rows + weight) if kept else 0
    return HeadMemory(
        saved=layer.norm(layer.sharded_tokens, hidden),
        loss_saved=rows + response_tokens * (2 * INDEX_BYTES + 2 * FP32_BYTES),
        # On a CPU, beside the logits their exponentials.
        forward=chunk * (1 if fused else 2) + layer.gathered + rows,
        backward=max(gradients + products, of_kept) + layer.gathered,
    )


def joint_head(layer: LayerActivations, *, policy: HeadMemory, value: HeadMemory) -> HeadMemory:
    """Both heads on one final norm: the value head's float32 copy of the hidden states is kept
    through the policy's pass and its backward pass."""
    wide = layer.sharded_tokens * layer.hidden * FP32_BYTES
    return HeadMemory(
        saved=policy.saved + wide,
        loss_saved=policy.loss_saved,
        forward=max(policy.forward, value.forward),
        backward=max(policy.backward, value.backward) + layer.stream,
    )
