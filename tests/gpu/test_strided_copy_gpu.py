"""The kernel that makes many strided copies in one launch, on the device."""

import sys
from pathlib import Path

import torch

from rlhf_megatron.reshard.strided_copy import Block, StridedCopies, can_copy_strided

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from strided_cases import check_kernel


def test_all_kinds_of_blocks():
    device = torch.device("cuda", torch.cuda.current_device())
    assert can_copy_strided(device)
    assert check_kernel(device, num_cases=200) > 500


def test_addresses_beyond_32_bits():
    """Columns of a matrix of 6 GB, the other halves of its rows into a packed buffer of 3 GB."""
    device = torch.device("cuda", torch.cuda.current_device())
    matrix = torch.randint(-(2**31), 2**31 - 1, (98304, 8192), device=device).view(torch.bfloat16)
    columns = matrix[:, matrix.size(1) // 2 :]
    packed = torch.zeros(columns.shape, dtype=matrix.dtype, device=device)
    copies = StridedCopies(
        [Block.packed(0, shape=columns.shape)],
        sources=[Block.of(columns)],
        itemsize=matrix.itemsize,
        device=device,
    )
    copies.run(target_base=packed.data_ptr())
    assert torch.equal(packed.view(torch.int16), columns.view(torch.int16))
