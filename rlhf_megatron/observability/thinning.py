"""Long curves put together: so many steps become one point."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MEAN, LARGEST = "mean", "largest"

_LARGEST_KEYS = ("memory", "grad_norm", "_max", "skipped")
"""Parts of the keys of metrics in which a single step counts."""


@dataclass(frozen=True, kw_only=True)
class Thinned:
    """A curve with at most as many points as asked for."""

    steps: list[int]
    """The last step of each bucket."""
    values: list[float | None]
    bucket_steps: int
    """Steps put together in a point; 1 where the curve is as it was."""


def rule_of(key: str) -> str:
    """What stands for several steps of a metric: their mean, or the largest."""
    return LARGEST if any(part in key for part in _LARGEST_KEYS) else MEAN


def thin(
    steps: Sequence[int], values: Sequence[float | None], *, most: int, key: str = ""
) -> Thinned:
    """At most `most` points, of as many steps each; None values do not count, and a bucket without
    any other is None."""
    size = max(math.ceil(len(steps) / most), 1)
    if size == 1:
        return Thinned(steps=list(steps), values=list(values), bucket_steps=1)
    found: list[float | None] = []
    for start in range(0, len(values), size):
        part = [value for value in values[start : start + size] if value is not None]
        if not part:
            found.append(None)
        else:
            found.append(max(part) if rule_of(key) == LARGEST else math.fsum(part) / len(part))
    ends = [steps[min(start + size, len(steps)) - 1] for start in range(0, len(steps), size)]
    return Thinned(steps=ends, values=found, bucket_steps=size)
