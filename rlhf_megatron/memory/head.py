"""What a model's ends need: embedding, final norm, value head, and log-probs from hidden states.

The chunked log-probs of models/vocab_parallel.py, counted line by line. Shape letters: R response
tokens of a micro-batch, C of them in a chunk, V vocabulary rows of a rank, H hidden size.
"""

from dataclasses import dataclass

from rlhf_megatron.memory.activations import FP32_BYTES, INDEX_BYTES, LayerActivations

LOGPROB_CHUNK_TOKENS = 1024
"""Default of models.vocab_parallel.token_log_probs."""
FORWARD_ARRAYS = 3
"""[C, V] in float32 at once: logits, their exponentials, the product of both."""
BACKWARD_ARRAYS = 5
"""log p, p, -p, and two terms of the gradient."""


@dataclass(frozen=True, kw_only=True)
class HeadMemory:
    """Bytes at the ends of the model, on the ranks that have them."""

    saved: int
    """Saved for the backward pass of each micro-batch in flight on the last stage."""
    loss_saved: int
    """Saved by the loss, of one micro-batch."""
    forward: int
    """Workspace of the log-probs without gradients."""
    backward: int
    """Workspace of the loss's backward pass."""


def embedding_saved(layer: LayerActivations) -> int:
    """Token ids, on the first stage; with composite kernels each stage keeps two orders of rows."""
    return layer.tokens * INDEX_BYTES


def packing_saved(layer: LayerActivations) -> int:
    """What the core attention keeps of a micro-batch for all layers."""
    return 2 * layer.tokens * INDEX_BYTES if layer.kernels == "composite" else 0


def value_head(layer: LayerActivations) -> HeadMemory:
    """Final norm, and the hidden states in float32."""
    return HeadMemory(
        saved=layer.norm(layer.sharded_tokens, layer.hidden)
        + layer.sharded_tokens * layer.hidden * FP32_BYTES,
        loss_saved=0,
        forward=2 * layer.sharded_tokens * layer.hidden * FP32_BYTES,
        backward=layer.sharded_tokens * layer.hidden * FP32_BYTES,
    )


def policy_head(
    layer: LayerActivations, *, response_tokens: int, vocabulary_rows: int
) -> HeadMemory:
    """Final norm, hidden states of the response tokens, and the log-probs' chunks."""
    itemsize, hidden = layer.itemsize, layer.hidden
    chunk = min(LOGPROB_CHUNK_TOKENS, response_tokens) * vocabulary_rows
    weight = vocabulary_rows * hidden
    several = response_tokens > LOGPROB_CHUNK_TOKENS
    rows = response_tokens * hidden * itemsize
    converted = itemsize if itemsize < FP32_BYTES else 0
    # Several chunks: the arrays of the one before are alive while the logits are made.
    forward = chunk * (FORWARD_ARRAYS * FP32_BYTES + (converted if several else 0))
    terms = chunk * (BACKWARD_ARRAYS * FP32_BYTES + (itemsize if several else 0))
    product = chunk * (2 * FP32_BYTES + itemsize) + weight * itemsize
    return HeadMemory(
        saved=layer.norm(layer.sharded_tokens, hidden),
        loss_saved=rows + response_tokens * (2 * INDEX_BYTES + 2 * FP32_BYTES),
        forward=forward + layer.gathered + rows,
        backward=max(terms, product) + weight * FP32_BYTES + layer.gathered + rows,
    )
