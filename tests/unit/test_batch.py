"""Ragged batches against lists of lists."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.batch import (
    RaggedBatch,
    concatenate,
    from_sequences,
    load_batch,
    ragged_ranges,
    save_batch,
)


@dataclass
class Sample:
    """One sample as plain lists."""

    prompt: list[int]
    response: list[int]
    key: tuple[int, int]
    reward: float
    values: list[float] = field(default_factory=list)


@st.composite
def samples(draw, min_size: int = 0) -> list[Sample]:
    """Samples with prompts of at least one token; responses may be empty."""
    tokens = st.integers(0, 99)
    lists = draw(
        st.lists(
            st.tuples(
                st.lists(tokens, min_size=1, max_size=4),
                st.lists(tokens, max_size=4),
                st.tuples(st.integers(0, 3), st.integers(0, 3)),
                st.floats(-1, 1, width=32),
            ),
            min_size=min_size,
            max_size=6,
        )
    )
    return [
        Sample(*parts, values=[10.0 * index + t for t in range(len(parts[1]))])
        for index, parts in enumerate(lists)
    ]


def to_batch(chosen: list[Sample]) -> RaggedBatch:
    batch = from_sequences([s.prompt for s in chosen], responses=[s.response for s in chosen])
    batch.sample.update(
        prompt_ids=torch.tensor([s.key[0] for s in chosen], dtype=torch.int64),
        sample_indices=torch.tensor([s.key[1] for s in chosen], dtype=torch.int64),
        rewards=torch.tensor([s.reward for s in chosen]),
    )
    batch.response["values"] = torch.tensor([v for s in chosen for v in s.values])
    return batch


def assert_is(batch: RaggedBatch, chosen: list[Sample]) -> None:
    """The batch holds exactly these samples, in this order, with their fields."""
    assert len(batch) == len(chosen)
    assert batch.tokens.tolist() == [t for s in chosen for t in (*s.prompt, *s.response)]
    assert batch.num_tokens == len(batch.tokens)
    assert batch.num_response_tokens == sum(len(s.response) for s in chosen)
    for index, one in enumerate(chosen):
        assert batch.prompt_tokens(index) == one.prompt
        assert batch.response_tokens(index) == one.response
    backwards = list(reversed(range(len(chosen))))
    assert batch.responses(backwards) == [chosen[i].response for i in backwards]
    assert batch.sample["rewards"].tolist() == [s.reward for s in chosen]
    assert batch.sample["prompt_ids"].tolist() == [s.key[0] for s in chosen]
    assert batch.response["values"].tolist() == [v for s in chosen for v in s.values]


@given(samples())
def test_alignment(chosen):
    batch = to_batch(chosen)
    assert_is(batch, chosen)
    states, responses, last, owners, begin = [], [], [], [], 0
    offsets, response_offsets = [0], [0]
    for index, one in enumerate(chosen):
        first = begin + len(one.prompt)
        for t in range(len(one.response)):
            states.append(first + t - 1)
            responses.append(first + t)
            owners.append(index)
        begin = first + len(one.response)
        last.append(begin - 1)
        offsets.append(begin)
        response_offsets.append(len(responses))
    assert batch.state_indices.tolist() == states
    assert batch.response_indices.tolist() == responses
    assert batch.last_indices.tolist() == last
    assert batch.sample_of_response_token.tolist() == owners
    assert batch.cu_seqlens.tolist() == offsets
    assert batch.response_cu_seqlens.tolist() == response_offsets
    assert batch.tokens[batch.response_indices].tolist() == [t for s in chosen for t in s.response]


@given(samples(min_size=1), st.data())
def test_select(chosen, data):
    """Any order, with repetitions, by a list or a tensor."""
    indices = data.draw(st.lists(st.integers(0, len(chosen) - 1), max_size=8))
    expected = [chosen[i] for i in indices]
    assert_is(to_batch(chosen).select(indices), expected)
    assert_is(to_batch(chosen).select(torch.tensor(indices, dtype=torch.int64)), expected)


@given(st.lists(samples(), min_size=1, max_size=3))
def test_concatenate(parts):
    whole = concatenate([to_batch(part) for part in parts])
    assert_is(whole, [one for part in parts for one in part])


@given(samples())
def test_order_by_prompt(chosen):
    """By (prompt id, sample index); equals keep their order."""
    expected = sorted(chosen, key=lambda one: one.key)
    batch = to_batch(chosen)
    assert_is(batch.select(batch.order_by_prompt()), expected)


@given(chosen=samples())
def test_save_and_load(tmp_path_factory, chosen):
    path: Path = tmp_path_factory.mktemp("batch") / "batch.pt"
    save_batch(to_batch(chosen), path=path)
    assert_is(load_batch(path), chosen)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=6))
def test_ragged_ranges(rows):
    starts = torch.tensor([start for start, _ in rows], dtype=torch.int64)
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int64)
    expected = [start + i for start, length in rows for i in range(length)]
    assert ragged_ranges(starts, lengths).tolist() == expected


@pytest.mark.parametrize("place", ["sample", "response"])
def test_a_field_of_the_wrong_length_is_refused(place):
    one = from_sequences([[1, 2]], responses=[[3]])
    with pytest.raises(AssertionError, match="wrong"):
        RaggedBatch(
            tokens=one.tokens,
            prompt_lengths=one.prompt_lengths,
            response_lengths=one.response_lengths,
            **{place: {"wrong": torch.zeros(2)}},
        )
