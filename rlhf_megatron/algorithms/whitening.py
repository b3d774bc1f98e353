"""Whitening of advantages."""

import torch
from torch import Tensor

_VARIANCE_OFFSET = 1e-8


def whiten(values: Tensor, *, mask: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8) over the tokens with mask > 0, and 0 elsewhere; [R].

    Takes the whole global batch, since a part of it has another mean. The variance is that of the
    population (divided by the count); moments are taken in float64. One valid token gives 0.
    """
    valid = mask > 0
    chosen = values[valid].double()
    result = torch.zeros_like(values)
    if len(chosen):
        centred = chosen - chosen.mean()
        scale = torch.sqrt(centred.square().mean() + _VARIANCE_OFFSET)
        result[valid] = (centred / scale).to(values.dtype)
    return result
