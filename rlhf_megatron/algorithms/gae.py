"""Generalised advantage estimation over ragged responses, and what truncation does to it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.algorithms.ragged import sample_of_token


@dataclass(frozen=True)
class GaeResult:
    """Both [R], in the dtype of the values, 0 where loss_mask is 0."""

    advantages: Tensor
    returns: Tensor
    """advantages + values, before any whitening."""


def generalized_advantage_estimation(
    rewards: Tensor,
    *,
    values: Tensor,
    bootstrap_values: Tensor,
    response_lengths: Tensor,
    loss_mask: Tensor,
    gamma: float,
    gae_lambda: float,
) -> GaeResult:
    """A_t = delta_t + gamma * lambda * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t.

    rewards, values, loss_mask [R]; values[t] is V of the state before token t. bootstrap_values [B]
    is V_{n+1}: 0 after EOS (the helper below). A token with loss_mask 0 (a tool's
    output) is no action of the policy: it is left out of the chain, so that the value and the
    advantage of the token after it reach the token before it. Its own reward is not read.
    Computed in float64. Schulman et al. 2016 (arXiv:1506.02438), equation 16.
    """
    valid = loss_mask > 0
    owners = sample_of_token(response_lengths, num_tokens=len(rewards))[valid]
    lengths = torch.bincount(owners, minlength=len(response_lengths))
    width = int(lengths.max()) if len(lengths) else 0
    # One row a time step, one column a sample, padded at the beginning: every chain then starts in
    # the last row, and what is computed in the padding is never read.
    ends = torch.cumsum(lengths, dim=0)
    rows = torch.arange(len(owners), device=owners.device) - ends[owners] + width

    def padded(flat: Tensor) -> Tensor:
        grid = torch.zeros(width, len(lengths), dtype=torch.float64, device=flat.device)
        grid[rows, owners] = flat[valid].double()
        return grid

    reward_grid, value_grid = padded(rewards), padded(values)
    advantage_grid = torch.zeros_like(value_grid)
    accumulated = torch.zeros(len(lengths), dtype=torch.float64, device=values.device)
    next_values = bootstrap_values.double()
    for row in reversed(range(width)):
        delta = reward_grid[row] + gamma * next_values - value_grid[row]
        accumulated = delta + gamma * gae_lambda * accumulated
        advantage_grid[row] = accumulated
        next_values = value_grid[row]

    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    flat_advantages = advantage_grid[rows, owners]
    advantages[valid] = flat_advantages.to(values.dtype)
    returns[valid] = (flat_advantages + values[valid].double()).to(values.dtype)
    return GaeResult(advantages, returns)


def bootstrap_values(last_values: Tensor, *, truncated: Tensor, policy: str) -> Tensor:
    """V_{n+1} of each response, [B]: 0 after EOS.

    last_values [B] is the critic's value of the state after the whole response; it stands in for
    the return that a truncated response did not live to see, under policy "bootstrap" only.
    """
    zeros = torch.zeros_like(last_values)
    return torch.where(truncated.bool(), last_values, zeros) if policy == "bootstrap" else zeros


def truncated_loss_mask(
    loss_mask: Tensor, *, truncated: Tensor, response_lengths: Tensor, policy: str
) -> Tensor:
    """loss_mask [R] with the truncated responses ([B] bool) taken out under policy "mask".

    To be applied before rewards, advantages and whitening, so that nothing of a masked response
    reaches the losses or their counts.
    """
    if policy != "mask":
        return loss_mask
    owners = sample_of_token(response_lengths, num_tokens=len(loss_mask))
    return torch.where(truncated.bool()[owners], torch.zeros_like(loss_mask), loss_mask)
