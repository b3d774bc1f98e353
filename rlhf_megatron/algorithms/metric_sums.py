"""Metrics as sums with their counts, which add up over micro-batches and ranks."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class MetricSums:
    """Sums and maxima of a part of a batch.

    `sums[name]` is [2] float64, (sum, count): adding them over parts and dividing gives the exact
    mean of the whole. `maxima[name]` is a float64 scalar. A part without tokens has the same names,
    with zeros, so that the names are the same on all ranks.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add_mean(self, name: str, *, total: Tensor, count: Tensor) -> None:
        """Record a sum and the count that its mean is over."""
        self.sums[name] = torch.stack([total.detach().double(), count.detach().double()])

    def add_maximum(self, name: str, *, values: Tensor) -> None:
        """Record the largest of `values` (not negative), 0 where there are none."""
        values = values.detach().double()
        self.maxima[name] = values.max() if values.numel() else values.new_zeros(())

    def merge(self, other: "MetricSums") -> None:
        """Take in another part's figures; its names must be these, unless this is still empty."""
        if not self.sums and not self.maxima:
            self.sums, self.maxima = dict(other.sums), dict(other.maxima)
            return
        assert self.sums.keys() == other.sums.keys() and self.maxima.keys() == other.maxima.keys()
        for name, pair in other.sums.items():
            self.sums[name] = self.sums[name] + pair
        for name, value in other.maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value)

    def means(self) -> dict[str, float]:
        """sum / count of each name, 0 where nothing was counted, and the maxima."""
        result = {}
        for name, pair in self.sums.items():
            total, count = pair.tolist()
            result[name] = total / count if count else 0.0
        return result | {name: float(value) for name, value in self.maxima.items()}
