"""Transfers that lie at regular distances, joined so that one copy moves them all.

Megatron-Core keeps q, k and v rows of each KV group together and an engine keeps all q rows
together, so a layer's `q_proj` is as many boxes as there are KV groups: one strip of them is a
single strided copy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import mul
from typing import TYPE_CHECKING

from rlhf_megatron.reshard.plan import Transfer

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class View:
    """`count` regions of one shape in one parameter, `step` rows apart."""

    parameter: str
    start: tuple[int, ...]
    """Of the first region."""
    shape: tuple[int, ...]
    count: int
    step: int

    def of(self, tensors: "Mapping[str, Tensor]") -> "Tensor":
        """The elements as [count, *shape]; without the first axis where count is 1. Only for a
        parameter that `lies_in` holds for."""
        parameter = tensors[self.parameter]
        strides = parameter.stride()
        offset = parameter.storage_offset() + sum(map(mul, self.start, strides))
        if self.count == 1:
            return parameter.as_strided(self.shape, strides, offset)
        return parameter.as_strided(
            (self.count, *self.shape), (self.step * strides[0], *strides), offset
        )

    def lies_in_one_piece(self, parameter_shape: Sequence[int]) -> bool:
        """Whether the elements follow one another in a contiguous parameter of that shape."""
        strides = [prod(parameter_shape[axis + 1 :]) for axis in range(len(parameter_shape))]
        expected = 1
        axes = [(self.count, self.step * strides[0]), *zip(self.shape, strides, strict=True)]
        for size, stride in reversed(axes):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    def lies_in(self, tensors: "Mapping[str, Tensor]") -> bool:
        """Whether the parameter is there, and large enough."""
        parameter = tensors.get(self.parameter)
        if parameter is None or parameter.dim() != len(self.shape):
            return False
        stop = [a + n for a, n in zip(self.start, self.shape, strict=True)]
        stop[0] += self.step * (self.count - 1)
        return all(a <= n for a, n in zip(stop, parameter.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Strip:
    """One copy: from a view of a parameter of rank `src` into one of a parameter of `dst`."""

    src: int
    dst: int
    source: View
    target: View
    numel: int


def join(transfers: Sequence[Transfer]) -> list[Strip]:
    """Join each run of transfers between two ranks that go on at the same distances. Two ranks
    that join the same transfers get the same strips."""
    strips: list[Strip] = []
    run: list[Transfer] = []
    for transfer in transfers:
        if run and not _goes_on(run, transfer):
            strips.append(_strip(run))
            run = []
        run.append(transfer)
    if run:
        strips.append(_strip(run))
    return strips


def _goes_on(run: Sequence[Transfer], after: Transfer) -> bool:
    first, last = run[0], run[-1]
    if (last.src, last.dst) != (after.src, after.dst):
        return False
    if (last.source_parameter, last.target_parameter) != (
        after.source_parameter,
        after.target_parameter,
    ):
        return False
    if last.box.shape != after.box.shape:
        return False
    steps = _steps(last, after)
    if steps is None or steps[0] <= 0 or steps[1] < after.box.shape[0]:
        return False
    return len(run) == 1 or steps == _steps(first, run[1])


def _steps(one: Transfer, other: Transfer) -> tuple[int, int] | None:
    """Rows from one to the other, in the source and in the target; None where they do not lie
    below each other."""
    if one.source_region[1:] != other.source_region[1:]:
        return None
    if one.target_region[1:] != other.target_region[1:]:
        return None
    return (
        other.source_region[0].start - one.source_region[0].start,
        other.target_region[0].start - one.target_region[0].start,
    )


def _strip(run: Sequence[Transfer]) -> Strip:
    first, count = run[0], len(run)
    steps = _steps(first, run[1]) if count > 1 else (0, 0)
    assert steps is not None
    shape = first.box.shape
    return Strip(
        first.src,
        first.dst,
        View(first.source_parameter, _start(first.source_region), shape, count, steps[0]),
        View(first.target_parameter, _start(first.target_region), shape, count, steps[1]),
        first.box.numel * count,
    )


def _start(region: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.start for part in region)
