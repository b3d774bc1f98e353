"""Many strided copies on a GPU in one launch.

A sync is hundreds of copies of a few megabytes. Launched one by one from Python they take 5 us
each, as long as the memory takes to move them; here the GPU reads what to copy from a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for the CPU comes without it
    triton = None

TILE_UNITS = 4096
"""What one program of the kernel moves."""

MOST_UNITS = 2**31 - TILE_UNITS
"""Of one copy: the kernel counts in 32 bits, in which a GPU divides four times as fast."""

_COLUMNS = 9
_UNITS = (8, 4, 2, 1)


@dataclass(frozen=True)
class Block:
    """Elements in memory: an address in bytes, or an offset from a base, and axes in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Block":
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride())

    @classmethod
    def packed(cls, offset_bytes: int, *, shape: Sequence[int]) -> "Block":
        """The same elements, one after the other."""
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        return cls(offset_bytes, tuple(shape), tuple(reversed(strides)))


@dataclass(frozen=True)
class _Copy:
    """At most three axes of units, the last one without gaps on both sides."""

    unit_bytes: int
    target: int
    source: int
    shape: tuple[int, int, int]
    target_steps: tuple[int, int]
    source_steps: tuple[int, int]

    @property
    def num_units(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]

    def row(self) -> tuple[int, ...]:
        _, middle, inner = self.shape
        head = (self.target, self.source, self.num_units, inner, middle)
        return (*head, *self.target_steps, *self.source_steps)


class StridedCopies:
    """Copies of `sources` to `targets`, in pairs of one shape, of elements of `itemsize` bytes.

    Those that the kernel does not take, of more than three axes or too large, are in `left_out`,
    by number. Addresses are relative to the bases that `run` is given.
    """

    def __init__(
        self,
        targets: Sequence[Block],
        *,
        sources: Sequence[Block],
        itemsize: int,
        device: torch.device,
    ) -> None:
        self.left_out: list[int] = []
        by_unit: dict[int, list[_Copy]] = {}
        for number, (target, source) in enumerate(zip(targets, sources, strict=True)):
            copy = _in_units(target, source=source, itemsize=itemsize)
            if copy is None:
                self.left_out.append(number)
            elif copy.num_units:
                by_unit.setdefault(copy.unit_bytes, []).append(copy)
        self._tables = [
            (unit, *_table(copies, device=device)) for unit, copies in sorted(by_unit.items())
        ]

    def run(self, *, target_base: int = 0, source_base: int = 0) -> None:
        """On the current stream."""
        assert not (target_base % _UNITS[0] or source_base % _UNITS[0])
        for unit, tiles, copies in self._tables:
            _copy_tiles[(tiles.size(0),)](
                tiles,
                copies,
                target_base,
                source_base,
                columns=_COLUMNS,
                unit_bytes=unit,
                tile_units=TILE_UNITS,
                num_warps=8,
            )


def can_copy_strided(device: torch.device) -> bool:
    """Whether StridedCopies works there."""
    return triton is not None and device.type == "cuda"


def _in_units(target: Block, *, source: Block, itemsize: int) -> _Copy | None:
    """The pair with neighbouring axes merged, in the largest units that fit; None if not taken."""
    assert target.shape == source.shape, (target, source)
    axes = _merge(list(zip(target.shape, target.strides, source.strides, strict=True)))
    if len(axes) > 3 or axes[-1][1:] != (1, 1):
        return None
    axes = [(1, 0, 0)] * (3 - len(axes)) + axes
    outer, middle, (inner, _, _) = axes
    aligned = [n * itemsize for n in (*outer[1:], *middle[1:], inner)]
    aligned += [target.address, source.address]
    unit = next(unit for unit in _UNITS if not any(n % unit for n in aligned))
    copy = _Copy(
        unit,
        target.address,
        source.address,
        (outer[0], middle[0], inner * itemsize // unit),
        (outer[1] * itemsize // unit, middle[1] * itemsize // unit),
        (outer[2] * itemsize // unit, middle[2] * itemsize // unit),
    )
    return copy if copy.num_units <= MOST_UNITS else None


_Axis = tuple[int, int, int]
"""Size, step in the target, step in the source."""


def _merge(axes: Sequence[_Axis]) -> list[_Axis]:
    """Fewer axes for the same elements; a last one of steps 1 always."""
    merged: list[_Axis] = [(1, 1, 1)]
    for size, *steps in reversed(axes):
        inner = merged[0]
        if size == 1:
            continue
        if steps == [inner[0] * inner[1], inner[0] * inner[2]]:
            merged[0] = (inner[0] * size, inner[1], inner[2])
        else:
            merged.insert(0, (size, steps[0], steps[1]))
    return merged


def _table(copies: Sequence[_Copy], *, device: torch.device) -> tuple[Tensor, Tensor]:
    """[tiles, 2], int32: the copy and which tile of it; [copies, _COLUMNS], int64."""
    counts = torch.tensor([-(-copy.num_units // TILE_UNITS) for copy in copies])
    owner = torch.arange(len(copies)).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[owner]
    tiles = torch.stack((owner, torch.arange(len(owner)) - first), dim=1).int()
    rows = torch.tensor([copy.row() for copy in copies], dtype=torch.int64)
    return tiles.to(device), rows.to(device)


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _copy_tiles(
        tiles: Any,
        copies: Any,
        target_base: Any,
        source_base: Any,
        columns: tl.constexpr,
        unit_bytes: tl.constexpr,
        tile_units: tl.constexpr,
    ) -> None:
        tile = tiles + 2 * tl.program_id(0)
        copy = copies + columns * tl.load(tile).to(tl.int64)
        index = tile_units * tl.load(tile + 1) + tl.arange(0, tile_units)
        target = tl.load(copy) + target_base
        source = tl.load(copy + 1) + source_base
        num_units = tl.load(copy + 2).to(tl.int32)
        inner = tl.load(copy + 3).to(tl.int32)
        middle = tl.load(copy + 4).to(tl.int32)
        target_at = index.to(tl.int64)
        source_at = index.to(tl.int64)
        # One branch for the whole program: most copies have no gaps, and divide nothing.
        if inner < num_units:
            row = index // inner
            column = index - row * inner
            outer = row // middle
            row = (row - outer * middle).to(tl.int64)
            outer = outer.to(tl.int64)
            target_at = column + row * tl.load(copy + 6) + outer * tl.load(copy + 5)
            source_at = column + row * tl.load(copy + 8) + outer * tl.load(copy + 7)
        is_there = index < num_units
        if unit_bytes == 8:
            unit = tl.int64
        elif unit_bytes == 4:
            unit = tl.int32
        elif unit_bytes == 2:
            unit = tl.int16
        else:
            unit = tl.int8
        here = (source + source_at * unit_bytes).to(tl.pointer_type(unit))
        there = (target + target_at * unit_bytes).to(tl.pointer_type(unit))
        tl.store(there, tl.load(here, mask=is_there), mask=is_there)
