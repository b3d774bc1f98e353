"""Micro-batches: packed samples with all that a forward pass and a loss need, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_megatron.batch import RaggedBatch, ragged_ranges
from rlhf_megatron.models.packing import PackedSequences, pack_sequences


@dataclass
class MicroBatch:
    """b samples packed in a row of T tokens with R response tokens; b, R may be 0."""

    tokens: Tensor  # [1, T] int64
    packed: PackedSequences
    state_indices: Tensor  # [R] row of the token before each response token
    targets: Tensor  # [R] the response tokens
    last_indices: Tensor  # [b] row of each sample's last token
    response_lengths: Tensor  # [b] int64
    fields: dict[str, Tensor]  # each [R], on the device
    response_rows: Tensor  # [R] on the CPU: where the response tokens stand in the whole batch
    sample_rows: Tensor  # [b] on the CPU: where the samples stand in the whole batch
    values: Tensor | None = None  # [T] once it has passed through a model with both heads


def make_micro_batch(
    batch: RaggedBatch,
    *,
    samples: Sequence[int],
    fields: Sequence[str],
    pad_to_multiple: int,
    device: torch.device,
) -> MicroBatch:
    """Pack `samples` of `batch`.

    A rank without samples in this micro-batch gets one sequence of padding, so that it enters every
    collective of the forward and backward pass; padding to a multiple (sequence parallelism splits
    the row over TP ranks) is a sequence of its own. Neither has response tokens.
    """
    rows = torch.as_tensor(list(samples), dtype=torch.int64)
    part = batch.select(rows)
    lengths: list[int] = part.lengths.tolist()
    padding = -sum(lengths) % pad_to_multiple or (pad_to_multiple if not lengths else 0)
    tokens = torch.cat([part.tokens, torch.zeros(padding, dtype=torch.int64)])
    response_rows = ragged_ranges(
        batch.response_cu_seqlens[:-1][rows], batch.response_lengths[rows]
    )
    return MicroBatch(
        tokens=tokens[None].to(device),
        packed=pack_sequences([*lengths, padding] if padding else lengths, device=device),
        state_indices=part.state_indices.to(device),
        targets=part.tokens[part.response_indices].to(device),
        last_indices=part.last_indices.to(device),
        response_lengths=part.response_lengths.to(device),
        fields={name: part.response[name].to(device) for name in fields},
        response_rows=response_rows,
        sample_rows=rows,
    )


def equal_micro_batches(
    micro_batches: Sequence[MicroBatch], *, number_multiple: int
) -> list[MicroBatch]:
    """The micro-batches with padding at their ends, so that all have as many tokens as the largest,
    and empty ones after them to a multiple of `number_multiple`."""
    size = max(m.tokens.size(1) for m in micro_batches)
    missing = -len(micro_batches) % number_multiple
    equal = [_padded(m, num_tokens=size) for m in micro_batches]
    return equal + [_emptied(equal[0]) for _ in range(missing)]


def _padded(micro_batch: MicroBatch, *, num_tokens: int) -> MicroBatch:
    """Sequences of padding after the others, none longer than the longest of those."""
    missing = num_tokens - micro_batch.tokens.size(1)
    if not missing:
        return micro_batch
    full, rest = divmod(missing, micro_batch.packed.max_seqlen_q)
    padding = [micro_batch.packed.max_seqlen_q] * full + [rest] * bool(rest)
    return replace(
        micro_batch,
        tokens=F.pad(micro_batch.tokens, (0, missing)),
        packed=pack_sequences(
            [*micro_batch.packed.lengths, *padding], device=micro_batch.tokens.device
        ),
    )


def _emptied(like: MicroBatch) -> MicroBatch:
    """The same tokens as if they were padding: without samples."""
    return replace(
        like,
        state_indices=like.state_indices[:0],
        targets=like.targets[:0],
        last_indices=like.last_indices[:0],
        response_lengths=like.response_lengths[:0],
        fields={name: values[:0] for name, values in like.fields.items()},
        response_rows=like.response_rows[:0],
        sample_rows=like.sample_rows[:0],
    )
