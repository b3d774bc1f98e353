"""Micro-batches: packed samples with all that a forward pass and a loss need, on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_megatron.batch import RaggedBatch, ragged_ranges
from rlhf_megatron.engine.transfer import to_device
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
    # Without the fields, of which only some are asked for.
    part = RaggedBatch(
        tokens=batch.tokens,
        prompt_lengths=batch.prompt_lengths,
        response_lengths=batch.response_lengths,
    ).select(rows)
    padding = padding_tokens(part.num_tokens, pad_to_multiple=pad_to_multiple)
    response_rows = ragged_ranges(batch.response_cu_seqlens[:-1][rows], part.response_lengths)
    packed, offsets = _described([*part.lengths.tolist(), *[padding] * bool(padding)])
    moved = to_device(
        {
            "tokens": F.pad(part.tokens, (0, padding))[None],
            **offsets,
            "state_indices": part.state_indices,
            "targets": part.tokens[part.response_indices],
            "last_indices": part.last_indices,
            "response_lengths": part.response_lengths,
            **{name: batch.response[name][response_rows] for name in fields},
        },
        device=device,
    )
    return MicroBatch(
        tokens=moved.pop("tokens"),
        packed=_placed(packed, offsets={name: moved.pop(name) for name in offsets}),
        state_indices=moved.pop("state_indices"),
        targets=moved.pop("targets"),
        last_indices=moved.pop("last_indices"),
        response_lengths=moved.pop("response_lengths"),
        fields=moved,
        response_rows=response_rows,
        sample_rows=rows,
    )


def _described(lengths: Sequence[int]) -> tuple[PackedSequences, dict[str, Tensor]]:
    """The sequences in a row, and what of that goes to the device, for `_placed`."""
    packed = pack_sequences(lengths, device=torch.device("cpu"))
    assert packed.position_ids is not None
    return packed, {"cu_seqlens": packed.cu_seqlens_q, "position_ids": packed.position_ids}


def _placed(packed: PackedSequences, *, offsets: Mapping[str, Tensor]) -> PackedSequences:
    packed.cu_seqlens_q = packed.cu_seqlens_kv = offsets["cu_seqlens"]
    packed.position_ids = offsets["position_ids"]
    return packed


def padding_tokens(num_tokens: int, *, pad_to_multiple: int) -> int:
    """How many follow the tokens of a micro-batch's samples: to a multiple, and not to 0."""
    return -num_tokens % pad_to_multiple or (0 if num_tokens else pad_to_multiple)


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
    packed, offsets = _described([*micro_batch.packed.lengths, *padding])
    return replace(
        micro_batch,
        tokens=F.pad(micro_batch.tokens, (0, missing)),
        packed=_placed(packed, offsets=to_device(offsets, device=micro_batch.tokens.device)),
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
