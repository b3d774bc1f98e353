"""Copies of tensors in host memory, from which a checkpoint is written while training goes on."""

import torch
from torch import Tensor


class HostBuffers:
    """One buffer a name, allocated once (pinned where tensors come from a GPU) and used again.

    A buffer is overwritten by the next copy of its name: a save must be complete by then.
    """

    def __init__(self, *, device: torch.device) -> None:
        """`device`: where the tensors live that will be copied."""
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def copy(self, name: str, *, tensor: Tensor) -> Tensor:
        """The tensor's values in host memory, contiguous, in a storage of their own; complete after
        `synchronize`."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda"
            )
            self._buffers[name] = buffer
        buffer.copy_(tensor.detach(), non_blocking=True)
        return buffer

    def synchronize(self) -> None:
        """Wait for the copies."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def num_bytes(self) -> int:
        return sum(b.numel() * b.element_size() for b in self._buffers.values())
