"""Files written in pieces: the bytes of the builtin `open`, in writes of bounded size."""

import os
from pathlib import Path

import pytest
import torch

from rlhf_megatron.checkpoint import pieces
from rlhf_megatron.checkpoint.compat import writes_in_pieces
from rlhf_megatron.checkpoint.pieces import WRITE_BYTES, open_in_pieces


@pytest.mark.parametrize("size", [0, 1, 8192, WRITE_BYTES - 1, WRITE_BYTES, 5 * WRITE_BYTES + 3])
def test_holds_what_was_written(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    with open_in_pieces(tmp_path / "file", "wb") as file:
        file.write(b"head")
        assert file.write(data) == size
        assert file.tell() == 4 + size
        file.write(b"tail")
    assert (tmp_path / "file").read_bytes() == b"head" + data + b"tail"


def test_no_write_is_longer_than_a_piece(tmp_path: Path) -> None:
    with pieces._PieceFile(tmp_path / "file", "wb") as file:
        assert file.write(bytes(3 * WRITE_BYTES)) == WRITE_BYTES


def test_torch_reads_what_it_saved(tmp_path: Path) -> None:
    tensor = torch.randn(300, 1001)
    with open_in_pieces(tmp_path / "file", "wb") as file:
        torch.save(tensor, file)
    assert torch.equal(torch.load(tmp_path / "file"), tensor)


def test_full_disk_is_an_error() -> None:
    with pytest.raises(OSError), open_in_pieces("/dev/full", "wb") as file:
        file.write(bytes(5 * WRITE_BYTES))


def test_megatron_opens_as_before_after_a_save() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    with pytest.raises(ValueError, match="in the block"), writes_in_pieces():
        assert vars(filesystem_async)["open"] is open_in_pieces
        raise ValueError("in the block")
    assert "open" not in vars(filesystem_async)
