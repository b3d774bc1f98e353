"""A rank's own copies of a sync: between its parameters, and between them and transfer buffers.

On a GPU one launch for all of them; what that does not take, and elsewhere all, one by one.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rlhf_megatron.reshard.strided_copy import Block, StridedCopies, can_copy_strided

WORD = torch.int64
"""What single copies move, where sizes and strides allow it: a GPU copies strided elements one by
one, and 16-bit ones at half the memory's rate."""


class LocalCopies:
    """Values to their places, pair by pair of one shape. What changes its dtype goes through
    `dtype` as a transfer would, so that replicas are equal bit for bit."""

    def __init__(
        self, places: Sequence[Tensor], *, values: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        fused: list[tuple[Tensor, Tensor]] = []
        rest: list[tuple[Tensor, Tensor]] = []
        for pair in zip(places, values, strict=True):
            fits = all(_fits(x, dtype=dtype, device=pair[0].device) for x in pair)
            (fused if fits else rest).append(pair)
        self._at_once = None
        if fused:
            self._at_once = StridedCopies(
                [Block.of(place) for place, _ in fused],
                sources=[Block.of(value) for _, value in fused],
                itemsize=dtype.itemsize,
                device=fused[0][0].device,
            )
            rest += [fused[number] for number in self._at_once.left_out]
        self._one_by_one = [_in_words(*pair, dtype=dtype) for pair in rest]

    def run(self) -> None:
        if self._at_once is not None:
            self._at_once.run()
        for place, value in self._one_by_one:
            if place.dtype not in (self._dtype, WORD):
                value = value.to(self._dtype)
            place.copy_(value)


class Packing:
    """Views side by side in a buffer of `numel` elements of `dtype` on `device`, in their order."""

    def __init__(
        self,
        views: Sequence[Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        into_buffer: bool,
    ) -> None:
        self._into_buffer = into_buffer
        *starts, self.numel = accumulate((view.numel() for view in views), initial=0)
        fused: list[tuple[int, Tensor]] = []
        rest: list[tuple[int, Tensor]] = []
        for start, view in zip(starts, views, strict=True):
            fits = _fits(view, dtype=dtype, device=device)
            (fused if fits else rest).append((start, view))
        self._at_once = None
        if fused:
            slots = [Block.packed(dtype.itemsize * at, shape=view.shape) for at, view in fused]
            blocks = [Block.of(view) for _, view in fused]
            self._at_once = StridedCopies(
                slots if into_buffer else blocks,
                sources=blocks if into_buffer else slots,
                itemsize=dtype.itemsize,
                device=device,
            )
            rest += [fused[number] for number in self._at_once.left_out]
        self._one_by_one = [(at, view, _words_of(view, dtype=dtype)) for at, view in rest]

    def run(self, buffer: Tensor) -> None:
        """From the views into the buffer, or back."""
        if self._at_once is not None:
            base = buffer.data_ptr()
            self._at_once.run(
                target_base=base if self._into_buffer else 0,
                source_base=0 if self._into_buffer else base,
            )
        for start, view, words in self._one_by_one:
            slot = buffer[start : start + view.numel()]
            if words is not None and _holds_words(slot):
                slot, view = slot.view(WORD), words
            slot = slot.view(view.shape)
            if self._into_buffer:
                slot.copy_(view)
            else:
                view.copy_(slot)


def _fits(x: Tensor, *, dtype: torch.dtype, device: torch.device) -> bool:
    return x.dtype == dtype and x.device == device and can_copy_strided(device)


def _in_words(place: Tensor, value: Tensor, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    words = _words_of(place, dtype=dtype), _words_of(value, dtype=dtype)
    if words[0] is None or words[1] is None:
        return place, value
    return words[0], words[1]


def _words_of(x: Tensor, *, dtype: torch.dtype) -> Tensor | None:
    """None where it cannot be seen as words, or is converted to `dtype`."""
    return x.view(WORD) if x.dtype == dtype and _holds_words(x) else None


def _holds_words(x: Tensor) -> bool:
    per_word = WORD.itemsize // x.itemsize
    aligned = (x.size(-1), x.storage_offset(), *x.stride()[:-1])
    return (
        x.stride(-1) == 1
        and x.data_ptr() % WORD.itemsize == 0
        and not any(n % per_word for n in aligned)
    )
