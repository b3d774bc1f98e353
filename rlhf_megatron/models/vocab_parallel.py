"""Log-probs and entropy over a vocabulary split across tensor-parallel ranks, from hidden states.

The [tokens, vocabulary] array does not exist whole. Forward it is cut over tokens, as each needs
its whole row; backward, where the normaliser of each token is known, over the vocabulary: so each
row of the weight's gradient is one product over all tokens, and needs no sum beside itself.
Backward computes the logits once more, but where the caller allows to keep them: a fourth of the
head's products for the memory of the array in the model's dtype.

On a GPU what is done to a chunk is compiled to single passes over it (fused.py); elsewhere it is
done in place.

Shape letters: N tokens, H hidden size, V padded vocabulary, t tensor-parallel size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.models.fused import grad_logits, row_maxima, row_sums

MASKED_LOGIT = -1e30
"""Logit of a padding row of the vocabulary: exp is exactly 0, and 0 * logit stays 0 (not NaN)."""

CHUNK_BYTES = 1 << 27
"""Of one float32 array of a chunk, of which two or three exist at a time."""

GPU_CHUNK_BYTES = 1 << 29
"""The same on a GPU, in the model's dtype: of a chunk, the logits and what takes their place. Small
chunks cost speed there, as each reads the whole weight (forward) or all hidden states (backward).
"""

TILE_ROWS = 256
"""Chunks of more rows are of a multiple of it: the tiles of matrix products."""


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
    chunk_bytes: int | None = None,
    kept_logits_bytes: int = 0,
) -> TokenLogProbs:
    """log pi(target) and the entropy of pi = softmax(hidden @ weight^T / temperature).

    hidden [N, H] must be the same on all ranks of the group, with its gradient summed over them by
    the caller (models/heads.py); weight [V / t, H]; targets [N] int64 < vocab_size. `chunk_bytes`:
    as CHUNK_BYTES or GPU_CHUNK_BYTES, the default; the same for all ranks of the group.
    `kept_logits_bytes`: the logits are kept for the backward pass where they take no more.
    """
    if chunk_bytes is None:
        chunk_bytes = GPU_CHUNK_BYTES if hidden.is_cuda else CHUNK_BYTES
    logprobs, entropy = _ChunkedLogProbs.apply(
        hidden, weight, targets, shard, temperature, chunk_bytes, kept_logits_bytes
    )
    return TokenLogProbs(logprobs=logprobs, entropy=entropy)


def _slices(count: int, *, other: int, like: Tensor, chunk_bytes: int) -> Iterator[slice]:
    """Cuts `count` rows of `other` logits each, of the dtype and device of `like`, into chunks."""
    itemsize = like.itemsize if like.is_cuda else 4
    size = max(1, chunk_bytes // (itemsize * max(other, 1)))
    if size > TILE_ROWS:
        size -= size % TILE_ROWS
    for begin in range(0, count, size):
        yield slice(begin, min(begin + size, count))


def _logits(
    hidden: Tensor, *, weight: Tensor, first_row: int, shard: VocabShard, out: Tensor | None = None
) -> Tensor:
    """[N, rows of `weight`], which are those of the shard from `first_row` on; not divided by the
    temperature. In float32 or more on a CPU, where no `out` is given."""
    logits = torch.matmul(hidden, weight.t(), out=out)
    logits[:, max(shard.real_rows - first_row, 0) :] = MASKED_LOGIT
    return logits if logits.is_cuda or out is not None else _wide(logits)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    """Divided, in float32 or more; takes the place of `logits` where it can."""
    wide = _wide(logits)
    if temperature != 1.0:
        wide /= temperature
    return wide


def _local_targets(targets: Tensor, *, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Targets as rows of [start, start + rows) (0 where elsewhere), and whether they are there."""
    local = targets - start
    here = (local >= 0) & (local < rows)
    return torch.where(here, local, torch.zeros_like(local)), here


def _maxima(logits: Tensor, *, temperature: float, group: Any) -> Tensor:
    """[N] over all ranks of the group, of the tempered logits."""
    maxima = row_maxima(logits, temperature)
    if group.size() > 1:
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
    return maxima


def _sums(logits: Tensor, *, maxima: Tensor, temperature: float) -> Tensor:
    """fused.row_sums, on a CPU in place: `logits` are used up."""
    if logits.is_cuda:
        return row_sums(logits, maxima, temperature)
    z = _tempered(logits, temperature)
    z -= maxima[:, None]
    exponentials = z.exp()
    total = exponentials.sum(-1)
    exponentials *= z
    return torch.stack((total, exponentials.sum(-1)))


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
        kept_logits_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(hidden.size(0), dtype=dtype, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        log_normaliser = torch.empty_like(logprobs)
        size = hidden.size(0) * weight.size(0)
        kept = None
        if any(ctx.needs_input_grad) and size * hidden.itemsize <= kept_logits_bytes:
            kept = hidden.new_empty(hidden.size(0), weight.size(0))
        for part in _slices(
            hidden.size(0), other=weight.size(0), like=hidden, chunk_bytes=chunk_bytes
        ):
            logits = _logits(
                hidden[part],
                weight=weight,
                first_row=0,
                shard=shard,
                out=None if kept is None else kept[part],
            )
            rows, here = _local_targets(targets[part], start=shard.start, rows=shard.rows)
            maxima = _maxima(logits, temperature=temperature, group=shard.group)
            target = logits.gather(1, rows[:, None])[:, 0].to(dtype) / temperature - maxima
            if kept is not None and not logits.is_cuda:
                logits = logits.clone()  # `_sums` uses them up
            sums = _sums(logits, maxima=maxima, temperature=temperature)
            sums = torch.cat((sums, (target * here)[None]))
            del logits  # before the next chunk's
            if shard.group.size() > 1:
                dist.all_reduce(sums, group=shard.group)
            log_sum = sums[0].log()
            logprobs[part] = sums[2] - log_sum
            entropy[part] = log_sum - sums[1] / sums[0]
            log_normaliser[part] = maxima + log_sum
        saved = (hidden, weight, targets, log_normaliser, entropy)
        ctx.save_for_backward(*saved, *([] if kept is None else [kept]))
        ctx.options = (shard, temperature, chunk_bytes)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, targets, log_normaliser, entropy, *kept = ctx.saved_tensors
        shard, temperature, chunk_bytes = ctx.options
        head = _Head(
            hidden=hidden,
            weight=weight,
            targets=targets,
            log_normaliser=log_normaliser,
            entropy=entropy,
            grad_logprobs=gradients[0],
            grad_entropy=gradients[1],
            shard=shard,
            temperature=temperature,
            chunk_bytes=chunk_bytes,
        )
        with_weight = ctx.needs_input_grad[1]
        found = head.of_kept(kept[0], with_weight) if kept else head.of_chunks(with_weight)
        return *found, None, None, None, None, None


@dataclass(frozen=True, kw_only=True)
class _Head:
    """What the backward pass knows, and its two ways to the gradients of hidden and weight."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    log_normaliser: Tensor
    entropy: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor
    shard: VocabShard
    temperature: float
    chunk_bytes: int

    def of_kept(self, logits: Tensor, with_weight: bool) -> tuple[Tensor, Tensor | None]:
        """From the logits of all tokens, which give way to their gradient."""
        for part in _slices(
            logits.size(0), other=logits.size(1), like=logits, chunk_bytes=self.chunk_bytes
        ):
            logits[part] = self._grad_logits(logits[part], tokens=part, first_row=0)
        grad_hidden = logits @ self.weight
        return grad_hidden, logits.t() @ self.hidden if with_weight else None

    def of_chunks(self, with_weight: bool) -> tuple[Tensor, Tensor | None]:
        """A part of the vocabulary at a time, whose logits are computed once more."""
        hidden, weight = self.hidden, self.weight
        # Chunks add up in float32: in bf16 small gradients would be lost.
        grad_hidden = torch.zeros_like(hidden, dtype=self.log_normaliser.dtype)
        grad_weight = torch.empty_like(weight) if with_weight else None
        for part in _slices(
            weight.size(0), other=hidden.size(0), like=hidden, chunk_bytes=self.chunk_bytes
        ):
            logits = _logits(hidden, weight=weight[part], first_row=part.start, shard=self.shard)
            grad = self._grad_logits(logits, tokens=slice(None), first_row=part.start)
            del logits
            if grad_weight is not None:
                torch.matmul(grad.t(), hidden, out=grad_weight[part])
            if grad_hidden.dtype == hidden.dtype:
                grad_hidden.addmm_(grad, weight[part])
            else:
                grad_hidden += grad @ weight[part]
            del grad  # before the next chunk's
        return grad_hidden.to(hidden.dtype), grad_weight

    def _grad_logits(self, logits: Tensor, *, tokens: slice, first_row: int) -> Tensor:
        """Of the logits of `tokens`, whose columns are rows of the shard from `first_row` on."""
        rows, here = _local_targets(
            self.targets[tokens], start=self.shard.start + first_row, rows=logits.size(1)
        )
        log_normaliser, entropy = self.log_normaliser[tokens], self.entropy[tokens]
        grad_logprobs, grad_entropy = self.grad_logprobs[tokens], self.grad_entropy[tokens]
        if logits.is_cuda:
            columns = torch.where(here, rows, -1)
            return grad_logits(
                logits, columns, log_normaliser, entropy, grad_logprobs, grad_entropy,
                self.temperature,
            )  # fmt: skip
        grad = _grad_in_place(
            _tempered(logits, self.temperature),
            log_normaliser=log_normaliser,
            entropy=entropy,
            grad_logprobs=grad_logprobs,
            grad_entropy=grad_entropy,
        )
        grad.scatter_add_(1, rows[:, None], (grad_logprobs * here)[:, None])
        if self.temperature != 1.0:
            grad /= self.temperature
        return grad.to(self.hidden.dtype)


def _grad_in_place(
    logits: Tensor,
    *,
    log_normaliser: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
) -> Tensor:
    """fused.grad_logits but for the targets' own part, of tempered logits and in their place."""
    logits -= log_normaliser[:, None]
    p = logits.exp()
    logits += entropy[:, None]
    logits *= grad_entropy[:, None]
    logits += grad_logprobs[:, None]
    logits *= p
    return logits.neg_()
