"""Micro-batches: packed samples with all that a forward pass and a loss need, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
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


def empty_micro_batch(like: MicroBatch, *, pad_to_multiple: int) -> MicroBatch:
    """One sequence of padding without samples, with the fields and device of `like`."""
    device = like.tokens.device
    return MicroBatch(
        tokens=torch.zeros(1, pad_to_multiple, dtype=torch.int64, device=device),
        packed=pack_sequences([pad_to_multiple], device=device),
        state_indices=like.state_indices[:0],
        targets=like.targets[:0],
        last_indices=like.last_indices[:0],
        response_lengths=like.response_lengths[:0],
        fields={name: values[:0] for name, values in like.fields.items()},
        response_rows=like.response_rows[:0],
        sample_rows=like.sample_rows[:0],
    )
