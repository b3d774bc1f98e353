"""Element-wise work as one pass over memory: compiled by torch on a GPU, plain elsewhere.

Layers are bound by memory traffic outside their matrix products: a function of five tensor
operations reads and writes its array five times, compiled it does so once.

Shape letters: T tokens, N rows, V columns (vocabulary rows of a shard), H heads, D head dimension.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

_Function = Callable[..., Tensor]


def compiled_on_gpu(function: _Function) -> _Function:
    """`function`, compiled at its first call whose first argument is on a GPU. Without gradients.

    Compiled code is bound to whether its arguments require gradients: they are detached, so that
    passes with and without gradients share it. It is also bound to a size of 0 or 1: few rows (an
    empty micro-batch, the last of a chunk) are left to the plain function, since torch compiles a
    function eight times and then leaves it plain for all sizes.
    """

    @cache
    def compiled() -> Any:
        return torch.compile(function)

    @wraps(function)
    def call(first: Tensor, *rest: Any) -> Tensor:
        if not first.is_cuda or first.size(0) < 2:
            return function(first, *rest)
        given = (x.detach() if isinstance(x, Tensor) else x for x in (first, *rest))
        return compiled()(*given)  # type: ignore[no-any-return]

    return call


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


@compiled_on_gpu
def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """[T, H, D] with its halves as the two coordinates of D / 2 planes, each turned by its angle:
    cosines and sines [T, 1, D / 2]. Rounded once, at the end."""
    first, second = x.to(_wide(x.dtype)).chunk(2, dim=-1)
    turned = first * cosines - second * sines, second * cosines + first * sines
    return torch.cat(turned, dim=-1).to(x.dtype)


@compiled_on_gpu
def rotate_back(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """`rotate` by the opposite angles: its transpose, and so the gradient's way back."""
    first, second = x.to(_wide(x.dtype)).chunk(2, dim=-1)
    turned = first * cosines + second * sines, second * cosines - first * sines
    return torch.cat(turned, dim=-1).to(x.dtype)


@compiled_on_gpu
def row_maxima(logits: Tensor, temperature: float) -> Tensor:
    """[N, V] -> [N], of logits / temperature."""
    return logits.amax(dim=-1).to(_wide(logits.dtype)) / temperature


@compiled_on_gpu
def row_sums(logits: Tensor, maxima: Tensor, temperature: float) -> Tensor:
    """[N, V] -> [2, N]: with z = logits / temperature - maxima, sum of exp(z), and of z exp(z)."""
    z = logits.to(_wide(logits.dtype)) / temperature - maxima[:, None]
    exponentials = z.exp()
    return torch.stack((exponentials.sum(-1), (exponentials * z).sum(-1)))


@compiled_on_gpu
def grad_logits(
    logits: Tensor,
    targets: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor,
    temperature: float,
) -> Tensor:
    """The gradient of the logits [N, V], in their dtype, from those of log-prob and entropy, [N].

    targets [N]: columns, -1 where the target is on another rank.
    d logprob / d z_j = [j = target] - p_j; d entropy / d z_j = -p_j (log p_j + entropy).
    """
    log_p = logits.to(_wide(logits.dtype)) / temperature - log_normaliser[:, None]
    columns = torch.arange(logits.size(1), device=logits.device)
    is_target = columns[None, :] == targets[:, None]
    at_target = torch.where(is_target, grad_logprobs[:, None], 0.0)
    slope = grad_logprobs[:, None] + grad_entropy[:, None] * (log_p + entropy[:, None])
    return ((at_target - slope * log_p.exp()) / temperature).to(logits.dtype)
