"""Log-probs and entropy over a vocabulary split across tensor-parallel ranks, from hidden states.

The product with the output weight, the softmax and their gradients are taken over chunks of
tokens; the [tokens, vocabulary] array never exists whole, forward or backward.

Shape letters: N tokens, H hidden size, V padded vocabulary, t tensor-parallel size, C chunk.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MASKED_LOGIT = -1e30
"""Logit of a padding row of the vocabulary: exp is exactly 0, and 0 * logit stays 0 (not NaN)."""


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
    chunk_tokens: int = 1024,
) -> TokenLogProbs:
    """log pi(target) and the entropy of pi = softmax(hidden @ weight^T / temperature).

    hidden [N, H] must be the same on all ranks of the group, with its gradient summed over them by
    the caller (models/heads.py); weight [V / t, H]; targets [N] int64 < vocab_size.
    """
    logprobs, entropy = _ChunkedLogProbs.apply(
        hidden, weight, targets, shard, temperature, chunk_tokens
    )
    return TokenLogProbs(logprobs=logprobs, entropy=entropy)


def _chunk_logits(hidden: Tensor, weight: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = torch.matmul(hidden, weight.t()).to(dtype)
    if temperature != 1.0:
        logits /= temperature
    logits[:, shard.real_rows :] = MASKED_LOGIT
    return logits


def _local_targets(targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Targets as rows of this shard (0 where elsewhere), and whether they are here."""
    rows = targets - shard.start
    here = (rows >= 0) & (rows < shard.rows)
    return torch.where(here, rows, torch.zeros_like(rows)), here


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        shard: VocabShard,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        count = hidden.size(0)
        logprobs = torch.empty(count, dtype=dtype, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        log_normaliser = torch.empty_like(logprobs)
        for begin in range(0, count, chunk_tokens):
            part = slice(begin, min(begin + chunk_tokens, count))
            logits = _chunk_logits(hidden[part], weight, shard, temperature)
            rows, here = _local_targets(targets[part], shard)
            maximum = logits.max(dim=-1).values
            if shard.group.size() > 1:
                dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=shard.group)
            logits -= maximum[:, None]
            target = logits.gather(1, rows[:, None])[:, 0] * here
            exponentials = logits.exp()
            sums = torch.stack((exponentials.sum(-1), (exponentials * logits).sum(-1), target))
            if shard.group.size() > 1:
                dist.all_reduce(sums, group=shard.group)
            log_sum = sums[0].log()
            logprobs[part] = sums[2] - log_sum
            entropy[part] = log_sum - sums[1] / sums[0]
            log_normaliser[part] = maximum + log_sum
        ctx.save_for_backward(hidden, weight, targets, log_normaliser, entropy)
        ctx.options = (shard, temperature, chunk_tokens)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_logprobs, grad_entropy = gradients
        hidden, weight, targets, log_normaliser, entropy = ctx.saved_tensors
        shard, temperature, chunk_tokens = ctx.options
        grad_hidden = torch.empty_like(hidden)
        # Chunks add up in float32: in bf16 a large vocabulary's small gradients would be lost.
        grad_weight = (
            torch.zeros_like(weight, dtype=log_normaliser.dtype)
            if ctx.needs_input_grad[1]
            else None
        )
        for begin in range(0, hidden.size(0), chunk_tokens):
            part = slice(begin, min(begin + chunk_tokens, hidden.size(0)))
            log_p = _chunk_logits(hidden[part], weight, shard, temperature)
            log_p -= log_normaliser[part, None]
            p = log_p.exp()
            # d logprob / d logit_j = [j = target] - p_j
            # d entropy / d logit_j = -p_j * (log p_j + entropy)
            grad = -p * (
                grad_logprobs[part, None] + grad_entropy[part, None] * (log_p + entropy[part, None])
            )
            rows, here = _local_targets(targets[part], shard)
            grad.scatter_add_(1, rows[:, None], (grad_logprobs[part] * here)[:, None])
            grad = (grad / temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None
