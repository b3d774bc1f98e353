"""Log-probs and entropy over a vocabulary split across tensor-parallel ranks, from hidden states.

The [tokens, vocabulary] array never exists whole. Forward it is cut over tokens, as each needs its
whole row; backward, where the normaliser of each token is known, over the vocabulary: so each row
of the weight's gradient is one product over all tokens, and needs no sum beside itself.

Shape letters: N tokens, H hidden size, V padded vocabulary, t tensor-parallel size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MASKED_LOGIT = -1e30
"""Logit of a padding row of the vocabulary: exp is exactly 0, and 0 * logit stays 0 (not NaN)."""

CHUNK_BYTES = 1 << 27
"""Of one float32 array of a chunk, of which two or three exist at a time. Smaller chunks cost speed
on a GPU, where each reads the whole weight (forward) or all hidden states (backward)."""


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """This rank's part of the vocabulary: rows [start, start + rows) of the padded weight."""

    start: int
    rows: int
    vocab_size: int
    """Real vocabulary; rows at or beyond it are padding and never chosen."""
    group: Any
    """Tensor-parallel process group."""

    @property
    def real_rows(self) -> int:
        return max(0, min(self.rows, self.vocab_size - self.start))


@dataclass(frozen=True, kw_only=True)
class TokenLogProbs:
    """Per token, float32 (float64 for a float64 model), [N]."""

    logprobs: Tensor
    entropy: Tensor


def token_log_probs(
    hidden: Tensor,
    *,
    weight: Tensor,
    targets: Tensor,
    shard: VocabShard,
    temperature: float,
    chunk_bytes: int = CHUNK_BYTES,
) -> TokenLogProbs:
    """log pi(target) and the entropy of pi = softmax(hidden @ weight^T / temperature).

    hidden [N, H] must be the same on all ranks of the group, with its gradient summed over them by
    the caller (models/heads.py); weight [V / t, H]; targets [N] int64 < vocab_size. `chunk_bytes`:
    as CHUNK_BYTES; the same for all ranks of the group.
    """
    logprobs, entropy = _ChunkedLogProbs.apply(
        hidden, weight, targets, shard, temperature, chunk_bytes
    )
    return TokenLogProbs(logprobs=logprobs, entropy=entropy)


def _slices(count: int, *, other: int, chunk_bytes: int) -> Iterator[slice]:
    """Cuts `count` rows of `other` float32 values each into chunks."""
    size = max(1, chunk_bytes // (4 * max(other, 1)))
    for begin in range(0, count, size):
        yield slice(begin, min(begin + size, count))


def _logits(
    hidden: Tensor, *, weight: Tensor, first_row: int, shard: VocabShard, temperature: float
) -> Tensor:
    """[N, rows of `weight`], which are those of the shard from `first_row` on."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = torch.matmul(hidden, weight.t()).to(dtype)
    if temperature != 1.0:
        logits /= temperature
    logits[:, max(shard.real_rows - first_row, 0) :] = MASKED_LOGIT
    return logits


def _local_targets(targets: Tensor, *, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Targets as rows of [start, start + rows) (0 where elsewhere), and whether they are there."""
    local = targets - start
    here = (local >= 0) & (local < rows)
    return torch.where(here, local, torch.zeros_like(local)), here


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabShard,
        temperature: float,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(hidden.size(0), dtype=dtype, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        log_normaliser = torch.empty_like(logprobs)
        for part in _slices(hidden.size(0), other=weight.size(0), chunk_bytes=chunk_bytes):
            logits = _logits(
                hidden[part], weight=weight, first_row=0, shard=shard, temperature=temperature
            )
            rows, here = _local_targets(targets[part], start=shard.start, rows=shard.rows)
            maximum = logits.max(dim=-1).values
            if shard.group.size() > 1:
                dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=shard.group)
            logits -= maximum[:, None]
            target = logits.gather(1, rows[:, None])[:, 0] * here
            exponentials = logits.exp()
            total = exponentials.sum(-1)
            exponentials *= logits
            sums = torch.stack((total, exponentials.sum(-1), target))
            del logits, exponentials  # before the next chunk's
            if shard.group.size() > 1:
                dist.all_reduce(sums, group=shard.group)
            log_sum = sums[0].log()
            logprobs[part] = sums[2] - log_sum
            entropy[part] = log_sum - sums[1] / sums[0]
            log_normaliser[part] = maximum + log_sum
        ctx.save_for_backward(hidden, weight, targets, log_normaliser, entropy)
        ctx.options = (shard, temperature, chunk_bytes)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_logprobs, grad_entropy = gradients
        hidden, weight, targets, log_normaliser, entropy = ctx.saved_tensors
        shard, temperature, chunk_bytes = ctx.options
        # Chunks add up in float32: in bf16 small gradients would be lost.
        grad_hidden = torch.zeros_like(hidden, dtype=log_normaliser.dtype)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for part in _slices(weight.size(0), other=hidden.size(0), chunk_bytes=chunk_bytes):
            grad = _grad_logits(
                _logits(
                    hidden,
                    weight=weight[part],
                    first_row=part.start,
                    shard=shard,
                    temperature=temperature,
                ),
                log_normaliser=log_normaliser,
                entropy=entropy,
                grad_logprobs=grad_logprobs,
                grad_entropy=grad_entropy,
            )
            rows, here = _local_targets(
                targets, start=shard.start + part.start, rows=part.stop - part.start
            )
            grad.scatter_add_(1, rows[:, None], (grad_logprobs * here)[:, None])
            if temperature != 1.0:
                grad /= temperature
            grad = grad.to(hidden.dtype)
            if grad_weight is not None:
                torch.matmul(grad.t(), hidden, out=grad_weight[part])
            if grad_hidden.dtype == hidden.dtype:
                grad_hidden.addmm_(grad, weight[part])
            else:
                grad_hidden += grad @ weight[part]
            del grad  # before the next chunk's
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


def _grad_logits(
    logits: Tensor,
    *,
    log_normaliser: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
) -> Tensor:
    """The gradient of the logits but for the targets' own part, in the place of `logits`.

    d logprob / d logit_j = [j = target] - p_j; d entropy / d logit_j = -p_j (log p_j + entropy).
    """
    logits -= log_normaliser[:, None]
    p = logits.exp()
    logits += entropy[:, None]
    logits *= grad_entropy[:, None]
    logits += grad_logprobs[:, None]
    logits *= p
    return logits.neg_()
