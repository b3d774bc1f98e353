"""Importance weights of tokens that another policy sampled than the one that is updated.

An engine samples with kernels, a precision and, with `reshard.interval` above 1, weights of its
own: mu. The trainer's policy before the step's updates is pi_old. PPO's ratio pi / pi_old corrects
for the updates alone; pi_old / mu corrects for the rest.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.algorithms.kl import LOG_RATIO_BOUND


@dataclass(frozen=True, kw_only=True)
class ImportanceWeights:
    """Of each response token."""

    weights: Tensor
    """[R] float32: min(pi_old / mu, cap); 0 where the mask is."""

    metrics: dict[str, float]


def importance_weights(
    old_logprobs: Tensor, *, rollout_logprobs: Tensor, loss_mask: Tensor, cap: float
) -> ImportanceWeights:
    """Per token min(exp(log pi_old - log mu), cap), all [R]; cap 0 truncates nothing.

    Truncation as in Espeholt et al. 2018 (arXiv:1802.01561, section 4.1, rho-bar) and, token by
    token for language models, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training": a bounded variance for a bias towards mu. No gradient flows through it.
    The log-ratio is clamped to +-LOG_RATIO_BOUND; what stands at masked tokens is not read.

    Metrics, over the tokens with mask above 0 and before truncation: off_policy/is_weight_mean,
    off_policy/is_weight_max; off_policy/is_clipped_fraction, the tokens above the cap.
    """
    valid = loss_mask > 0
    zeros = torch.zeros_like(old_logprobs)
    log_ratio = torch.where(valid, old_logprobs - rollout_logprobs, zeros)
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    weights = ratio.clamp(max=cap) if cap > 0 else ratio
    kept = ratio[valid].double()
    clipped = (kept > cap).double() if cap > 0 else torch.zeros_like(kept)
    metrics = {
        "off_policy/is_weight_mean": float(kept.mean()) if len(kept) else 1.0,
        "off_policy/is_weight_max": float(kept.max()) if len(kept) else 1.0,
        "off_policy/is_clipped_fraction": float(clipped.mean()) if len(kept) else 0.0,
    }
    return ImportanceWeights(weights=torch.where(valid, weights, zeros), metrics=metrics)
