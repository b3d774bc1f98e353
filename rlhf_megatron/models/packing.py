"""Packed sequences as the model sees them: many sequences in one row of tokens, no padding.

Shape letters: T packed tokens, N sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class PackedSequences(PackedSeqParams):
    """Where each sequence lies in the packed row.

    `qkv_format` is "sbhd" on purpose: Megatron-Core then treats the row as one sequence of T tokens
    and leaves it to our core attention to keep the sequences apart (`position_ids`,
    `cu_seqlens_q`). Its own "thd" path rotates sequence by sequence in a Python loop with a host
    synchronisation per layer (rope_utils.py, 0.16.1:202).
    """

    lengths: tuple[int, ...] = ()
    """Tokens of each sequence, [N]."""

    position_ids: Tensor | None = None
    """[T] int64: position of each token in its own sequence."""

    @cached_property
    def equal_length_rows(self) -> tuple[Tensor, ...]:
        """Rows of the sequences of one length each, [n, length]: what attention by SDPA works on.

        Made when first asked for: the variable-length kernels do without.
        """
        assert self.position_ids is not None
        begins_by_length: dict[int, list[int]] = {}
        begin = 0
        for length in self.lengths:
            begins_by_length.setdefault(length, []).append(begin)
            begin += length
        return tuple(
            (torch.tensor(begins)[:, None] + torch.arange(length)[None, :]).to(
                self.position_ids.device
            )
            for length, begins in begins_by_length.items()
        )

    @cached_property
    def row_of_token(self) -> Tensor:
        """[T] int64: place of each token in the concatenation of `equal_length_rows`."""
        order = torch.cat([rows.flatten() for rows in self.equal_length_rows])
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return places


def pack_sequences(lengths: Sequence[int], *, device: torch.device) -> PackedSequences:
    """Describe sequences of the given lengths, one after the other in a row."""
    ends = list(accumulate(lengths))
    cu_seqlens = torch.tensor([0, *ends], dtype=torch.int32, device=device)
    return PackedSequences(
        qkv_format="sbhd",
        lengths=tuple(lengths),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        position_ids=torch.cat([torch.arange(n) for n in lengths]).to(device),
    )
