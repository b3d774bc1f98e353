"""FLOPs of a training step, and how well its micro-batches are filled.

Two counts of FLOPs, which differ in the head alone:

  all tokens       observability/flops.py as the trainer reports it: every token goes through the
                   head
  response tokens  the head's product only where a response token is predicted, as it is computed

Both: 2 per matrix parameter and token; causal attention, 2 * s^2 * heads * head_dim a layer for a
sequence of s tokens; three times that for a forward and backward pass. Recomputed work, the
optimizer, norms and the embedding look-up are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.engine.microbatch import MicroBatch
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.observability.flops import forward_flops, numbers_of

MULTIPLY_ADD = 2


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Of one pass or update over a batch."""

    all_tokens: int
    response_tokens: int


def flops_of(
    arch: ModelArchitecture, *, batch: RaggedBatch, output_size: int, is_update: bool
) -> Flops:
    """`output_size`: rows of the head, the vocabulary or 1."""
    lengths = batch.lengths.tolist()
    body = forward_flops(numbers_of(arch, output_size=0), sequence_lengths=lengths)
    all_tokens = forward_flops(numbers_of(arch, output_size=output_size), sequence_lengths=lengths)
    head = MULTIPLY_ADD * arch.hidden_size * output_size * batch.num_response_tokens
    # The value head is one column, and is computed for every token.
    response_tokens = body + head if output_size > 1 else all_tokens
    passes = 3 if is_update else 1
    return Flops(all_tokens=passes * all_tokens, response_tokens=passes * response_tokens)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Micro-batches of one update, one rank's."""

    num_micro_batches: int
    tokens_mean: float
    tokens_max: int
    tokens_min: int
    padding_share: float
    """Tokens computed that belong to no sample, of all tokens computed."""
    imbalance: float
    """The largest micro-batch over the mean, less 1; in tokens."""
    attention_imbalance: float
    """The same of the sums of squared lengths."""

    def __str__(self) -> str:
        return (
            f"{self.num_micro_batches} micro-batches of {self.tokens_min} to {self.tokens_max} "
            f"tokens (mean {self.tokens_mean:.0f}): padding {self.padding_share:.2%}, imbalance "
            f"{self.imbalance:.2%} in tokens, {self.attention_imbalance:.2%} in attention"
        )


def packing_of(micro_batches: Sequence[MicroBatch], *, batch: RaggedBatch) -> Packing:
    sizes = [micro.tokens.size(1) for micro in micro_batches]
    lengths = [batch.lengths[micro.sample_rows] for micro in micro_batches]
    squares = [int((part * part).sum()) for part in lengths]
    used = sum(int(part.sum()) for part in lengths)
    return Packing(
        num_micro_batches=len(sizes),
        tokens_mean=mean(sizes),
        tokens_max=max(sizes),
        tokens_min=min(sizes),
        padding_share=1 - used / sum(sizes),
        imbalance=max(sizes) / mean(sizes) - 1,
        attention_imbalance=max(squares) / mean(squares) - 1,
    )
