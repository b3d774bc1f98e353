"""Exchange between ranks: only token ids, lengths and per-token scalars travel."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_megatron.batch import RaggedBatch, concatenate

logger = logging.getLogger(__name__)

Fields = Mapping[str, torch.dtype]


@dataclass(frozen=True, kw_only=True)
class GatheredBatch:
    """What `gather_batch` brought."""

    batch: RaggedBatch
    """The samples of all ranks, the same on every rank, ordered by (prompt, sample)."""
    own_rows: list[int]
    """Where in it this rank's samples are, in the order of its part."""
    bytes_received: int
    """By this rank, of token ids, lengths and fields."""
    seconds: float


@dataclass(frozen=True)
class _Part:
    """The sizes of one rank's samples."""

    samples: int
    tokens: int
    response_tokens: int


@dataclass(frozen=True)
class _Schema:
    """The fields of the samples, in the order in which they travel."""

    sample: Fields
    response: Fields

    def num_bytes(self, part: _Part) -> int:
        """Of a rank's samples on their way: 4 a token, 8 a sample for its two lengths, and the
        fields as they are."""
        per_sample = 8 + sum(dtype.itemsize for dtype in self.sample.values())
        per_response_token = sum(dtype.itemsize for dtype in self.response.values())
        return (
            4 * part.tokens + per_sample * part.samples + per_response_token * part.response_tokens
        )


def gather_batch(part: RaggedBatch | None, *, group: dist.ProcessGroup) -> GatheredBatch:
    """All ranks' samples as one batch.

    Each sample must be in one rank's part only; None where a rank has none. What comes out does not
    depend on how many engines there were or which rank scored what. The whole step's ids and
    scalars fit host memory easily (1024 samples of 4096 tokens: about 0.1 GB), and with the same
    batch everywhere each role can cut it to its own layout without asking its peers.
    """
    started = time.perf_counter()
    ranks = dist.get_process_group_ranks(group)
    parts, schema = _agree(part, group=group)
    own = group.rank()
    buffers = [torch.empty(schema.num_bytes(sizes), dtype=torch.uint8) for sizes in parts]
    if part is not None:
        buffers[own] = _packed(part, schema=schema)
    works = [
        dist.broadcast(buffer, src=ranks[index], group=group, async_op=True)
        for index, buffer in enumerate(buffers)
        if len(buffer)
    ]
    for work in works:
        work.wait()
    filled = [
        _unpacked(buffer, sizes=sizes, schema=schema)
        for buffer, sizes in zip(buffers, parts, strict=True)
        if sizes.samples
    ]
    assert filled, "no rank has any sample"
    received = sum(len(buffer) for index, buffer in enumerate(buffers) if index != own)
    seconds = time.perf_counter() - started
    if os.environ.get("RLHF_MEGATRON_DEBUG") == "1":
        logger.info(
            "exchange of samples, broadcast: (samples, tokens) by rank %s, %d bytes received, "
            "%.3f ms",
            [(sizes.samples, sizes.tokens) for sizes in parts],
            received,
            1e3 * seconds,
        )
    together = concatenate(filled)
    order = together.order_by_prompt()
    row_of = {position: row for row, position in enumerate(order)}
    first = sum(sizes.samples for sizes in parts[:own])
    return GatheredBatch(
        batch=together.select(order),
        own_rows=[row_of[first + i] for i in range(parts[own].samples)],
        bytes_received=received,
        seconds=seconds,
    )


def _agree(part: RaggedBatch | None, *, group: dist.ProcessGroup) -> tuple[list[_Part], _Schema]:
    """The sizes of all ranks' parts, and their fields, which are alike."""
    own: tuple[_Part, _Schema | None] = _Part(0, 0, 0), None
    if part is not None and len(part):
        schema = _Schema(
            {name: values.dtype for name, values in part.sample.items()},
            {name: values.dtype for name, values in part.response.items()},
        )
        own = _Part(len(part), part.num_tokens, part.num_response_tokens), schema
    found: list[tuple[_Part, _Schema | None]] = [own] * group.size()
    dist.all_gather_object(found, own, group=group)
    schemas = [schema for _, schema in found if schema is not None]
    assert schemas, "no rank has any sample"
    assert all(schema == schemas[0] for schema in schemas), schemas
    return [sizes for sizes, _ in found], schemas[0]


def _packed(batch: RaggedBatch, *, schema: _Schema) -> Tensor:
    tensors = [
        batch.tokens.to(torch.int32),
        batch.prompt_lengths.to(torch.int32),
        batch.response_lengths.to(torch.int32),
        *(batch.sample[name] for name in schema.sample),
        *(batch.response[name] for name in schema.response),
    ]
    return torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors])


def _unpacked(buffer: Tensor, *, sizes: _Part, schema: _Schema) -> RaggedBatch:
    start = 0

    def take(count: int, dtype: torch.dtype) -> Tensor:
        nonlocal start
        piece = buffer[start : start + count * dtype.itemsize]
        start += len(piece)
        return piece.clone().view(dtype)  # a copy begins where any type may

    tokens = take(sizes.tokens, torch.int32).long()
    prompt_lengths, response_lengths = (take(sizes.samples, torch.int32).long() for _ in range(2))
    return RaggedBatch(
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        sample={name: take(sizes.samples, dtype) for name, dtype in schema.sample.items()},
        response={
            name: take(sizes.response_tokens, dtype) for name, dtype in schema.response.items()
        },
    )


def share_out(count: int, *, part: int, num_parts: int) -> range:
    """Indices of one of `num_parts` shares of `count` items, dealt in turn."""
    return range(part, count, num_parts)


def gather_lists(items: Sequence, *, group: dist.ProcessGroup) -> list:
    """The items of all ranks, rank by rank."""
    parts: list[Sequence] = [()] * group.size()
    dist.all_gather_object(parts, list(items), group=group)
    return [item for part in parts for item in part]
