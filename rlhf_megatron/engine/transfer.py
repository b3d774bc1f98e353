"""Many small tensors to the device in one copy, which the host does not wait for."""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

ALIGNMENT_BYTES = 16
"""Of each tensor in the joint buffer: more than any dtype asks for."""


def to_device(tensors: Mapping[str, Tensor], *, device: torch.device) -> dict[str, Tensor]:
    """CPU tensors on `device`: views of one buffer, which lives as long as any of them.

    To a GPU the buffer goes from pinned memory, without waiting; the allocator of pinned memory
    reuses it once the copy is done. Ten copies from pageable memory would each hold the host up.
    """
    sizes = [-(-t.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for t in tensors.values()]
    *begins, total = accumulate(sizes, initial=0)
    host = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for begin, tensor in zip(begins, tensors.values(), strict=True):
        _view(host, begin=begin, like=tensor).copy_(tensor)
    moved = host.to(device, non_blocking=True)
    return {
        name: _view(moved, begin=begin, like=tensor)
        for begin, (name, tensor) in zip(begins, tensors.items(), strict=True)
    }


def _view(buffer: Tensor, *, begin: int, like: Tensor) -> Tensor:
    return buffer[begin : begin + like.nbytes].view(like.dtype).view(like.shape)
