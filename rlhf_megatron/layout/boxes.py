"""Boxes of logical tensors: the one idea that everything which moves weights is built on.

A *logical tensor* is a tensor as Hugging Face names and shapes it. A *layout* says, for one rank,
which half-open box of which logical tensor lies at which place of which physical parameter.
"""

from dataclasses import dataclass
from math import prod
from operator import ge, sub


@dataclass(frozen=True, slots=True)
class Box:
    """The half-open box start <= index < stop, one bound a dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        return prod(map(sub, self.stop, self.start))

    def intersect(self, other: "Box") -> "Box | None":
        """The common box, or None where there is none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(map(ge, start, stop)):
            return None
        return Box(start, stop)

    def slices(self, *, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """Index of this box in an array whose first element has the coordinates `origin`."""
        base = origin or (0,) * len(self.start)
        return tuple(
            slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, base, strict=True)
        )


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A tensor as Hugging Face names and shapes it."""

    name: str
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)


@dataclass(frozen=True, slots=True)
class Placement:
    """`box` of logical tensor `tensor` lies in `parameter`, its first element at `offset`.

    The physical region has the box's shape: parameter[offset : offset + box.shape].
    """

    tensor: str
    box: Box
    parameter: str
    offset: tuple[int, ...]

    def region(self, part: Box) -> tuple[slice, ...]:
        """Index into the parameter of `part`, a box inside `self.box`."""
        origin = tuple(s - o for s, o in zip(self.box.start, self.offset, strict=True))
        return part.slices(origin=origin)


RankLayout = tuple[Placement, ...]
"""All that one rank holds."""
