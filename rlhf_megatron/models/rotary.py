"""Rotary position embedding (arXiv:2104.09864) of packed tokens, at each one's own position.

Cosines and sines are made once for a micro-batch and shared by all layers. They are rounded to the
model's dtype, as transformers and vLLM have them.

Shape letters: T packed tokens, H heads, D head dimension.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.models.fused import rotate, rotate_back


@dataclass(frozen=True)
class Rotation:
    """Of each token, in D / 2 planes: [T, 1, D / 2] each."""

    cosines: Tensor
    sines: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Turned queries or keys, [T, H, D]."""
        turned: Tensor = _Rotate.apply(x, self.cosines, self.sines)  # type: ignore[assignment]
        return turned


class Rotary:
    """The rotary embedding of a model's layers on one rank."""

    def __init__(self, frequencies: Tensor) -> None:
        """frequencies: [D / 2] float32 on the model's device, radians per position."""
        self._frequencies = frequencies
        self._last: tuple[Tensor, Rotation] | None = None

    def at(self, position_ids: Tensor, *, dtype: torch.dtype) -> Rotation:
        """position_ids [T]. Made for the first layer that asks, and kept until another micro-batch
        comes: what backward passes need, autograd keeps."""
        if self._last is None or self._last[0] is not position_ids:
            angles = torch.outer(position_ids.to(torch.float32), self._frequencies)[:, None]
            found = Rotation(cosines=angles.cos().to(dtype), sines=angles.sin().to(dtype))
            self._last = (position_ids, found)
        return self._last[1]


class _Rotate(torch.autograd.Function):
    """Saves the angles, which all layers share, and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cosines, sines)
        return rotate(x, cosines, sines)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return rotate_back(gradients[0], *ctx.saved_tensors), None, None
