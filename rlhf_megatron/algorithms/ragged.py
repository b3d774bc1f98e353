"""What the algorithms ask of ragged [R] tensors: whose token, the last valid one, sums."""

import torch
from torch import Tensor


def sample_of_token(response_lengths: Tensor, *, num_tokens: int) -> Tensor:
    """Sample number of each response token: [B] -> [num_tokens] on the device of the lengths."""
    samples = torch.arange(len(response_lengths), device=response_lengths.device)
    return torch.repeat_interleave(samples, response_lengths, output_size=num_tokens)


def last_valid_indices(response_lengths: Tensor, *, loss_mask: Tensor) -> Tensor:
    """Index into [R] of each sample's last token with loss_mask > 0, or -1 where there is none.

    response_lengths [B], loss_mask [R] -> [B] int64.
    """
    found = torch.full_like(response_lengths, -1)
    owners = sample_of_token(response_lengths, num_tokens=len(loss_mask))
    indices = torch.arange(len(loss_mask), device=loss_mask.device)
    valid = loss_mask > 0
    return found.scatter_reduce(0, owners[valid], indices[valid], reduce="amax")


def response_sums(values: Tensor, *, loss_mask: Tensor, response_lengths: Tensor) -> Tensor:
    """Sum of [R] values over each response's valid tokens, [B] float64; 0 for an empty one."""
    owners = sample_of_token(response_lengths, num_tokens=len(values))
    valid = loss_mask > 0
    sums = torch.zeros(len(response_lengths), dtype=torch.float64, device=values.device)
    return sums.index_add(0, owners[valid], values[valid].double())
