"""Ragged batches: the one place that aligns tokens, log-probs, values and rewards.

Shape letters: B samples, T tokens of all samples (prompt and response), R response tokens of all
samples.

A sample is a prompt x_1..x_m and a response y_1..y_n; its tokens lie one after the other in the
flat `tokens`. Everything measured per response token lies flat in [R]: entry t of a sample belongs
to y_t. The *state* of y_t is the position of the token just before it, x_m or y_{t-1}: there the
logits that give y_t's log-prob and the critic's V(s_t) are read (`state_indices`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor


def exclusive_cumsum(lengths: Tensor) -> Tensor:
    """[B] lengths -> [B + 1] offsets, beginning with 0."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, dim=0, out=offsets[1:])
    return offsets


def ragged_ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate range(start, start + length) of all rows: [B], [B] -> [sum of lengths]."""
    offsets = exclusive_cumsum(lengths)
    within = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], lengths)
    return torch.repeat_interleave(starts, lengths) + within


@dataclass
class RaggedBatch:
    """B samples without padding; all tensors on the CPU.

    `sample` holds one value a sample ([B]), `response` one value a response token ([R]). Names in
    use: sample: `prompt_ids`, `sample_indices`, `truncated`, `weight_versions`, `seeds`, `rewards`.
    response: `rollout_logprobs`, `loss_mask` (1 where the policy sampled the token),
    `old_logprobs`, `ref_logprobs`, `values`, `token_rewards`, `advantages`, `returns`,
    `importance_weights`.
    """

    tokens: Tensor  # [T] int64
    prompt_lengths: Tensor  # [B] int64
    response_lengths: Tensor  # [B] int64
    sample: dict[str, Tensor] = field(default_factory=dict)  # each [B]
    response: dict[str, Tensor] = field(default_factory=dict)  # each [R]

    def __post_init__(self) -> None:
        assert len(self.prompt_lengths) == len(self.response_lengths)
        assert len(self.tokens) == self.num_tokens
        for name, values in self.sample.items():
            assert len(values) == len(self), (name, len(values), len(self))
        for name, values in self.response.items():
            assert len(values) == self.num_response_tokens, (name, len(values))

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sample, [B]."""
        return self.prompt_lengths + self.response_lengths

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_response_tokens(self) -> int:
        return int(self.response_lengths.sum())

    @property
    def num_bytes(self) -> int:
        """Of all tensors, fields included."""
        fields = (*self.sample.values(), *self.response.values())
        tensors = (self.tokens, self.prompt_lengths, self.response_lengths, *fields)
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def cu_seqlens(self) -> Tensor:
        """Offsets of the samples in `tokens`, [B + 1]."""
        return exclusive_cumsum(self.lengths)

    @property
    def response_cu_seqlens(self) -> Tensor:
        """Offsets of the samples in the [R] fields, [B + 1]."""
        return exclusive_cumsum(self.response_lengths)

    @property
    def state_indices(self) -> Tensor:
        """Index into `tokens` of the state of each response token, [R]."""
        return ragged_ranges(self.cu_seqlens[:-1] + self.prompt_lengths - 1, self.response_lengths)

    @property
    def response_indices(self) -> Tensor:
        """Index into `tokens` of each response token, [R]."""
        return self.state_indices + 1

    @property
    def last_indices(self) -> Tensor:
        """Index into `tokens` of each sample's last token, [B]: the state after the response."""
        return self.cu_seqlens[1:] - 1

    @property
    def sample_of_response_token(self) -> Tensor:
        """Sample number of each response token, [R]."""
        return torch.repeat_interleave(torch.arange(len(self)), self.response_lengths)

    def prompt_tokens(self, index: int) -> list[int]:
        start = int(self.cu_seqlens[index])
        return self.tokens[start : start + int(self.prompt_lengths[index])].tolist()

    def response_tokens(self, index: int) -> list[int]:
        stop = int(self.cu_seqlens[index + 1])
        return self.tokens[stop - int(self.response_lengths[index]) : stop].tolist()

    def responses(self, indices: Sequence[int]) -> list[list[int]]:
        """`response_tokens` of many samples, their offsets found once."""
        stops = self.cu_seqlens[1:].tolist()
        lengths = self.response_lengths.tolist()
        return [self.tokens[stops[i] - lengths[i] : stops[i]].tolist() for i in indices]

    def select(self, indices: Sequence[int] | Tensor) -> "RaggedBatch":
        """The samples at `indices`, in that order, with all their fields."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        token_rows = ragged_ranges(self.cu_seqlens[:-1][rows], self.lengths[rows])
        response_rows = ragged_ranges(
            self.response_cu_seqlens[:-1][rows], self.response_lengths[rows]
        )
        return RaggedBatch(
            tokens=self.tokens[token_rows],
            prompt_lengths=self.prompt_lengths[rows],
            response_lengths=self.response_lengths[rows],
            sample={name: values[rows] for name, values in self.sample.items()},
            response={name: values[response_rows] for name, values in self.response.items()},
        )

    def order_by_prompt(self) -> list[int]:
        """The samples' indices ordered by (prompt id, sample index): so selected, a batch is the
        same on any number of engines."""
        keys = zip(
            self.sample["prompt_ids"].tolist(), self.sample["sample_indices"].tolist(), strict=True
        )
        return [position for _, position in sorted((key, i) for i, key in enumerate(keys))]


def concatenate(batches: Sequence[RaggedBatch]) -> RaggedBatch:
    """One batch of all samples; the fields of all batches must agree."""
    assert batches, "concatenate needs at least one batch"
    first = batches[0]
    return RaggedBatch(
        tokens=torch.cat([b.tokens for b in batches]),
        prompt_lengths=torch.cat([b.prompt_lengths for b in batches]),
        response_lengths=torch.cat([b.response_lengths for b in batches]),
        sample={name: torch.cat([b.sample[name] for b in batches]) for name in first.sample},
        response={name: torch.cat([b.response[name] for b in batches]) for name in first.response},
    )


def from_sequences(
    prompts: Sequence[Sequence[int]], *, responses: Sequence[Sequence[int]]
) -> RaggedBatch:
    """A batch from token lists; fields are added by the caller."""
    tokens = [t for p, r in zip(prompts, responses, strict=True) for t in (*p, *r)]
    return RaggedBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        prompt_lengths=torch.tensor([len(p) for p in prompts], dtype=torch.int64),
        response_lengths=torch.tensor([len(r) for r in responses], dtype=torch.int64),
    )


def save_batch(batch: RaggedBatch, *, path: str | Path) -> None:
    """Record a batch with all its fields, to be read by `load_batch`."""
    torch.save(
        {
            "tokens": batch.tokens,
            "prompt_lengths": batch.prompt_lengths,
            "response_lengths": batch.response_lengths,
            "sample": batch.sample,
            "response": batch.response,
        },
        path,
    )


def load_batch(path: str | Path) -> RaggedBatch:
    """A batch recorded by `save_batch`."""
    return RaggedBatch(**torch.load(path, weights_only=True))
