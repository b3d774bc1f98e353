"""The PPO losses of a micro-batch, as a sum and the count that it is to be divided by.

The sum over micro-batches and data-parallel ranks, divided by the summed count, is the exact loss
of the mini-batch, whatever the split. [R] tensors are aligned as batch.py says; a token counts
where its loss_mask is above 0, and what stands at other tokens is never read. Nothing here casts
the inputs: give float32 (float64 in gradient checks).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.algorithms.config import PpoConfig
from rlhf_megatron.algorithms.kl import LOG_RATIO_BOUND, kl_estimate
from rlhf_megatron.algorithms.metric_sums import MetricSums
from rlhf_megatron.algorithms.ragged import sample_of_token


@dataclass(frozen=True)
class LossSum:
    """A loss of one micro-batch. It has no tokens, or all are masked: sum and count are 0, and the
    sum can still be differentiated."""

    loss_sum: Tensor
    """Scalar, differentiable."""

    count: Tensor
    """Scalar int64: tokens (token_mean) or responses with a valid token (the other two)."""

    metrics: MetricSums


@dataclass(frozen=True)
class _Aggregation:
    weights: Tensor  # [R]: the loss sum is the sum of weights * per-token losses
    valid: Tensor  # [R] bool
    num_tokens: Tensor
    count: Tensor

    def total(self, per_token: Tensor) -> Tensor:
        return (self.weights * per_token).sum()

    def over_tokens(self, per_token: Tensor) -> Tensor:
        return torch.where(self.valid, per_token, torch.zeros_like(per_token)).sum()


def _aggregation(
    loss_mask: Tensor,
    *,
    response_lengths: Tensor,
    aggregation: str,
    max_response_tokens: int,
    dtype: torch.dtype,
) -> _Aggregation:
    valid = loss_mask > 0
    weights = valid.to(dtype)
    num_tokens = valid.sum()
    if aggregation == "token_mean":
        return _Aggregation(weights, valid, num_tokens, num_tokens)
    owners = sample_of_token(response_lengths.to(valid.device), num_tokens=len(valid))
    tokens_of_sample = torch.zeros(len(response_lengths), dtype=dtype, device=valid.device)
    tokens_of_sample.index_add_(0, owners, weights)
    count = (tokens_of_sample > 0).sum()
    if aggregation == "sequence_mean":
        # Every valid token stands in a sample with at least one.
        weights = weights / tokens_of_sample.clamp(min=1)[owners]
    elif aggregation == "sequence_sum_norm":
        weights = weights / max_response_tokens
    else:
        raise AssertionError(f"unknown aggregation {aggregation}")
    return _Aggregation(weights, valid, num_tokens, count)


def _clipped_surrogate(ratio: Tensor, *, advantages: Tensor, config: PpoConfig) -> Tensor:
    """-min(rho*A, clip(rho)*A), and not above -c*A where A < 0 under the dual clip."""
    clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    loss = torch.maximum(-ratio * advantages, -clipped * advantages)
    if config.dual_clip > 0:
        bound = torch.minimum(loss, -config.dual_clip * advantages)
        loss = torch.where(advantages < 0, bound, loss)
    return loss


def policy_loss(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    response_lengths: Tensor,
    entropy: Tensor,
    ref_logprobs: Tensor | None,
    config: PpoConfig,
    kl_coefficient: float,
    max_response_tokens: int,
    importance_weights: Tensor | None = None,
) -> LossSum:
    """Clipped PPO objective, less the entropy bonus, plus the KL penalty where it is in the loss.

    logprobs, entropy (both differentiable), old_logprobs, advantages, loss_mask, ref_logprobs [R];
    response_lengths [B]. Per token, with rho = exp(log pi - log pi_old):
    max(-rho*A, -clip(rho, 1 - low, 1 + high)*A) (arXiv:1707.06347, equation 7); for A < 0 at most
    -c*A with dual_clip c (arXiv:1912.09729, equation 5), times importance_weights [R] where given
    (`importance.importance_weights`; no gradient); -entropy_coefficient * entropy; and
    +kl_coefficient * (k2 or k3), for which ref_logprobs must be given. The log-ratio is clamped to
    +-LOG_RATIO_BOUND. All terms share one aggregation; sequence_sum_norm divides by
    max_response_tokens (arXiv:2503.20783).

    Metrics (means over tokens, but for ppo/policy_loss and ppo/kl_loss, which follow the
    aggregation): ppo/policy_loss (the clipped term alone), ppo/approx_kl (k3 of KL(old || new)),
    ppo/approx_kl_k1, ppo/ratio_mean, ppo/clip_fraction (tokens where the clip decides),
    ppo/entropy, ppo/kl_loss (before its coefficient; only with KL in the loss), ppo/ratio_max.
    """
    parts = _aggregation(
        loss_mask,
        response_lengths=response_lengths,
        aggregation=config.aggregation,
        max_response_tokens=max_response_tokens,
        dtype=logprobs.dtype,
    )
    # Masked tokens are replaced before any arithmetic: a NaN times a zero weight would
    # still be NaN, in the loss and in the gradient.
    zeros = torch.zeros_like(logprobs)
    new = torch.where(parts.valid, logprobs, zeros)
    old = torch.where(parts.valid, old_logprobs, zeros)
    advantages = torch.where(parts.valid, advantages, zeros)
    entropy = torch.where(parts.valid, entropy, zeros)

    log_ratio = (new - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    surrogate = _clipped_surrogate(ratio, advantages=advantages, config=config)
    if importance_weights is not None:
        surrogate = surrogate * torch.where(parts.valid, importance_weights, zeros)
    surrogate_sum = parts.total(surrogate)
    loss_sum = surrogate_sum
    if config.entropy_coefficient > 0:
        loss_sum = loss_sum - config.entropy_coefficient * parts.total(entropy)

    metrics = MetricSums()
    metrics.add_mean("ppo/policy_loss", total=surrogate_sum, count=parts.count)
    if config.kl.place == "loss":
        assert ref_logprobs is not None, "KL in the loss needs the reference's log-probs"
        ref = torch.where(parts.valid, ref_logprobs, zeros)
        kl_sum = parts.total(kl_estimate(new, ref_logprobs=ref, estimator=config.kl.estimator))
        loss_sum = loss_sum + kl_coefficient * kl_sum
        metrics.add_mean("ppo/kl_loss", total=kl_sum, count=parts.count)

    with torch.no_grad():
        _policy_metrics(
            metrics,
            parts=parts,
            new=new,
            old=old,
            ratio=ratio,
            advantages=advantages,
            entropy=entropy,
            config=config,
        )
    return LossSum(loss_sum, parts.count, metrics)


def _policy_metrics(
    metrics: MetricSums,
    *,
    parts: _Aggregation,
    new: Tensor,
    old: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    entropy: Tensor,
    config: PpoConfig,
) -> None:
    above = (ratio > 1 + config.clip_ratio_high) & (advantages > 0)
    below = (ratio < 1 - config.clip_ratio_low) & (advantages < 0)
    per_token = {
        "ppo/approx_kl": kl_estimate(old, ref_logprobs=new, estimator="k3"),
        "ppo/approx_kl_k1": kl_estimate(old, ref_logprobs=new, estimator="k1"),
        "ppo/ratio_mean": ratio,
        "ppo/clip_fraction": (above | below).to(ratio.dtype),
        "ppo/entropy": entropy,
    }
    for name, values in per_token.items():
        metrics.add_mean(name, total=parts.over_tokens(values.double()), count=parts.num_tokens)
    # Not ratio[valid]: the host would wait for the device to learn how many there are.
    kept = torch.where(parts.valid, ratio, torch.zeros_like(ratio))
    metrics.add_maximum("ppo/ratio_max", values=kept)


def value_loss(
    values: Tensor,
    *,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    response_lengths: Tensor,
    config: PpoConfig,
    max_response_tokens: int,
) -> LossSum:
    """0.5 * max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) per token, aggregated as the
    policy loss; eps = value_clip, 0 takes 0.5 * (V - R)^2.

    values (differentiable), old_values, returns, loss_mask [R]; response_lengths [B].
    Metrics: critic/value_loss (follows the aggregation), critic/value_mean and
    critic/value_clip_fraction (tokens where the clipped error is the larger).
    """
    parts = _aggregation(
        loss_mask,
        response_lengths=response_lengths,
        aggregation=config.aggregation,
        max_response_tokens=max_response_tokens,
        dtype=values.dtype,
    )
    zeros = torch.zeros_like(values)
    values = torch.where(parts.valid, values, zeros)
    old_values = torch.where(parts.valid, old_values, zeros)
    returns = torch.where(parts.valid, returns, zeros)

    error = (values - returns).square()
    clip_wins = torch.zeros_like(parts.valid)
    if config.value_clip > 0:
        change = (values - old_values).clamp(-config.value_clip, config.value_clip)
        clipped_error = (old_values + change - returns).square()
        clip_wins = clipped_error > error
        error = torch.maximum(error, clipped_error)
    loss_sum = parts.total(0.5 * error)

    metrics = MetricSums()
    metrics.add_mean("critic/value_loss", total=loss_sum, count=parts.count)
    per_token = {
        "critic/value_mean": values.detach(),
        "critic/value_clip_fraction": clip_wins,
    }
    for name, figures in per_token.items():
        metrics.add_mean(name, total=parts.over_tokens(figures.double()), count=parts.num_tokens)
    return LossSum(loss_sum, parts.count, metrics)


def explained_variance(values: Tensor, *, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens with mask > 0.

    1 is a perfect critic, 0 one no better than a constant, below 0 worse. Returns that do not vary
    leave nothing to explain: 0.
    """
    valid = mask > 0
    targets = returns[valid].double()
    if not len(targets):
        return 0.0
    variance = targets.var(correction=0)
    residual = (targets - values[valid].double()).var(correction=0)
    return float(1 - residual / variance) if variance > 0 else 0.0
