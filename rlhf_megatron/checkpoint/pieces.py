"""Files written in pieces of moderate size.

The Linux page cache takes the memory of a long write in blocks of megabytes (large folios). A
virtual machine that reports free memory to its host has given just such blocks back, and gets them
again at the cost of a fault for each page: writes of tensors as a whole took nine times the
processor time of the same bytes in pieces of 64 KB, whose memory comes from smaller blocks.
"""

import io
from pathlib import Path

from typing_extensions import Buffer

WRITE_BYTES = 1 << 16


class _PieceFile(io.FileIO):
    """Takes at most WRITE_BYTES of each write, as an unbuffered file may."""

    def write(self, data: Buffer, /) -> int:
        return super().write(memoryview(data)[:WRITE_BYTES])


def open_in_pieces(path: str | Path, mode: str) -> io.BufferedWriter:
    """As the builtin `open` opens a binary file to write it."""
    return io.BufferedWriter(_PieceFile(path, mode))
