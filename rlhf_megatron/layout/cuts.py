"""Cutting parameters for tensor parallelism: rules in, placements out. Integers only."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlhf_megatron.layout.boxes import Box, LogicalTensor, Placement

VOCAB_PADDING = 64
"""vLLM pads the vocabulary to a multiple of it (vllm/model_executor/layers/
vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE); the Megatron side follows."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows start <= row < stop of a logical tensor."""

    tensor: LogicalTensor
    start: int
    stop: int


def share(size: int, *, parts: int, index: int) -> range:
    """The index-th of `parts` equal parts of range(size)."""
    assert size % parts == 0, (size, parts)
    return range(index * size // parts, (index + 1) * size // parts)


def interleaved(tensors: Iterable[LogicalTensor], *, groups: int) -> Iterator[Rows]:
    """For each group in turn, each tensor's share of it: [q..q, k, v] per KV group, and so on."""
    tensors = tuple(tensors)
    for group in range(groups):
        for tensor in tensors:
            part = share(tensor.shape[0], parts=groups, index=group)
            yield Rows(tensor, part.start, part.stop)


def stack(rows: Iterable[Rows], *, parameter: str, window: range) -> Iterator[Placement]:
    """Place the rows one after another, of which the parameter holds those in `window`.

    The window may cut through a piece; rows beyond the last piece (vocabulary padding) belong to no
    box.
    """
    position = 0
    for piece in rows:
        first = max(position, window.start)
        last = min(position + piece.stop - piece.start, window.stop)
        if first < last:
            row = piece.start + first - position
            other = piece.tensor.shape[1:]
            zeros = (0,) * len(other)
            box = Box((row, *zeros), (row + last - first, *other))
            yield Placement(piece.tensor.name, box, parameter, (first - window.start, *zeros))
        position += piece.stop - piece.start


def whole(tensor: LogicalTensor, *, parameter: str) -> Placement:
    """All of the tensor, from the parameter's first element on."""
    return Placement(tensor.name, tensor.box, parameter, (0,) * len(tensor.shape))


def columns(
    tensor: LogicalTensor, *, parameter: str, tensor_parallel_size: int, tp_rank: int
) -> Placement:
    """This rank's equal part of dimension 1."""
    part = share(tensor.shape[1], parts=tensor_parallel_size, index=tp_rank)
    box = Box((0, part.start), (tensor.shape[0], part.stop))
    return Placement(tensor.name, box, parameter, (0, 0))
