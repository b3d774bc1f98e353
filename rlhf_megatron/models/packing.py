"""Packed sequences as the model sees them: many sequences in one row of tokens, no padding.

Shape letters: T packed tokens, N sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedSequences(PackedSeqParams):
    """Where each sequence lies in the packed row.

    `qkv_format` is "sbhd" on purpose: Megatron-Core then treats the row as one sequence of T tokens
    and leaves it to our rotary embedding (`position_ids`) and core attention (`cu_seqlens_q`) to
    keep the sequences apart. Its own "thd" path rotates sequence by sequence in a Python loop with
    a host synchronisation per layer (rope_utils.py, 0.16.1:202).
    """

    lengths: tuple[int, ...] = ()
    """Tokens of each sequence, [N]."""

    position_ids: Tensor | None = None
    """[T] int64: position of each token in its own sequence."""

    equal_length_rows: tuple[Tensor, ...] = ()
    """Rows of the sequences of one length each, [n, length]: what attention by SDPA works on."""

    row_of_token: Tensor | None = None
    """[T] int64: place of each token in the concatenation of `equal_length_rows`."""


def pack_sequences(lengths: Sequence[int], *, device: torch.device) -> PackedSequences:
    """Describe sequences of the given lengths, one after the other in a row."""
    starts, total = [], 0
    by_length: dict[int, list[int]] = {}
    for length in lengths:
        starts.append(total)
        by_length.setdefault(length, []).append(total)
        total += length
    rows = tuple(
        torch.tensor(begins)[:, None] + torch.arange(length)[None, :]
        for length, begins in by_length.items()
    )
    order = torch.cat([r.flatten() for r in rows])
    row_of_token = torch.empty(total, dtype=torch.int64)
    row_of_token[order] = torch.arange(total)
    cu_seqlens = torch.tensor([*starts, total], dtype=torch.int32, device=device)
    return PackedSequences(
        qkv_format="sbhd",
        lengths=tuple(lengths),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        position_ids=torch.cat([torch.arange(n) for n in lengths]).to(device),
        equal_length_rows=tuple(r.to(device) for r in rows),
        row_of_token=row_of_token.to(device),
    )
