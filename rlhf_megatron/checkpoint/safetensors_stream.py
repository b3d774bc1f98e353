"""Safetensors files written in place, region by region, by any number of processes.

The library's own writer wants all tensors of a file in memory at once. Format: 8 bytes
little-endian length of a JSON header, the header (padded with spaces to 8 bytes), the data.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from rlhf_megatron.checkpoint.pieces import WRITE_BYTES

DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}


@dataclass(frozen=True)
class FileLayout:
    """Where each tensor's bytes go in one file."""

    header: bytes
    """The length and the JSON."""
    starts: dict[str, int]
    """Position of each tensor's first byte in the file."""
    num_bytes: int
    """Size of the file."""

    def create(self, path: Path) -> None:
        """Write the header and set the file's size."""
        with path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.num_bytes)


def file_layout(shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype) -> FileLayout:
    """The layout of a file with these tensors, in this order, all of one dtype."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, offset = {}, 0
    for name, shape in shapes.items():
        offsets[name], stop = offset, offset + prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = {name: len(header) + value for name, value in offsets.items()}
    return FileLayout(header, starts, len(header) + offset)


class RegionWriter:
    """Writes into files that exist already; a context manager. Raises OSError, as a full disk
    does."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}

    def write(self, path: Path, *, position: int, tensor: Tensor) -> int:
        """Write a tensor's elements, in order, from `position` on; returns the number of bytes."""
        if path not in self._files:
            self._files[path] = os.open(path, os.O_WRONLY)
        data = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        written = 0
        while written < len(data):
            piece = data[written : written + WRITE_BYTES]
            written += os.pwrite(self._files[path], piece, position + written)
        return written

    def flush(self) -> None:
        """Wait until everything is on the disk."""
        for file in self._files.values():
            os.fsync(file)

    def __enter__(self) -> "RegionWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()
