"""Rewards per response token: the KL penalty at every token, the score at the last one.

[R] tensors are aligned as batch.py says; a token counts where its loss_mask is above 0.
"""

import torch
from torch import Tensor

from rlhf_megatron.algorithms.kl import kl_estimate
from rlhf_megatron.algorithms.ragged import last_valid_indices


def token_rewards(
    scores: Tensor,
    *,
    response_lengths: Tensor,
    loss_mask: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    kl_coefficient: float,
    truncated: Tensor,
    policy: str,
    truncation_penalty: float,
) -> Tensor:
    """r_t = -beta * k1_t + [t = last valid token] * R, and 0 where loss_mask is 0; [R].

    scores [B] are the rewards of whole responses, logprobs and ref_logprobs [R] in nats, of the
    policy that sampled; ref_logprobs None leaves the KL penalty out. Under policy "penalty" a
    truncated response's score falls by truncation_penalty; the other policies leave rewards alone.
    A response without a valid token has nowhere to put its score, and drops it.
    Ziegler et al. 2019 (arXiv:1909.08593), equation 2.
    """
    valid = loss_mask > 0
    rewards = torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        penalty = kl_coefficient * kl_estimate(logprobs, ref_logprobs=ref_logprobs, estimator="k1")
        rewards = torch.where(valid, -penalty, rewards)
    if policy == "penalty":
        scores = scores - truncation_penalty * truncated.to(scores.dtype)
    last = last_valid_indices(response_lengths, loss_mask=loss_mask)
    has_token = last >= 0
    rewards[last[has_token]] += scores[has_token].to(rewards.dtype)
    return rewards
