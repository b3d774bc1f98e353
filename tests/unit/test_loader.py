"""The order of the prompts: complete, repeatable, resumable."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.data.loader import PromptLoader
from rlhf_megatron.data.prompts import PromptRow, PromptSet
from rlhf_megatron.errors import UserError


def prompt_set(count: int, *, offset: int = 0) -> PromptSet:
    rows = tuple(
        PromptRow(prompt_id=i, text=str(i), token_ids=(i + offset,), messages=None, fields={})
        for i in range(count)
    )
    return PromptSet(Path("prompts.jsonl"), rows)


def draw(loader: PromptLoader, steps: int) -> list[list[int]]:
    return [[row.prompt_id for row in loader.next_step()] for _ in range(steps)]


@given(st.integers(1, 30), st.data(), st.integers(0, 5), st.booleans())
def test_every_pass_holds_every_prompt_once(
    count: int, data: st.DataObject, seed: int, shuffle: bool
) -> None:
    per_step = data.draw(st.integers(1, count))
    loader = PromptLoader(prompt_set(count), prompts_per_step=per_step, seed=seed, shuffle=shuffle)
    steps = draw(loader, 3 * count)  # ends exactly after 3 * per_step passes
    assert all(len(step) == len(set(step)) == per_step for step in steps)
    flat = [i for step in steps for i in step]
    for start in range(0, len(flat), count):
        assert sorted(flat[start : start + count]) == list(range(count))
    assert set(Counter(flat).values()) == {3 * per_step}


def test_without_shuffling_the_file_order_stays() -> None:
    loader = PromptLoader(prompt_set(5), prompts_per_step=2, seed=0, shuffle=False)
    assert draw(loader, 5) == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


def test_order_depends_on_the_seed_and_pass_alone() -> None:
    def order(seed: int) -> list[list[int]]:
        return draw(PromptLoader(prompt_set(40), prompts_per_step=40, seed=seed), 2)

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1)[0] != order(1)[1] != list(range(40))


def test_order_is_pinned() -> None:
    """A changed order would break the resume of older runs."""
    loader = PromptLoader(prompt_set(6), prompts_per_step=4, seed=7)
    assert draw(loader, 3) == [[0, 1, 5, 3], [4, 2, 3, 5], [0, 1, 4, 2]]


@given(st.integers(1, 12), st.data())
def test_resume_goes_on_where_it_stopped(count: int, data: st.DataObject) -> None:
    per_step = data.draw(st.integers(1, count))
    before = data.draw(st.integers(0, 20))
    loader = PromptLoader(prompt_set(count), prompts_per_step=per_step, seed=3)
    draw(loader, before)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = PromptLoader(prompt_set(count), prompts_per_step=per_step, seed=3)
    resumed.load_state_dict(state)
    assert draw(resumed, 9) == draw(loader, 9)


def test_resume_refuses_what_it_cannot_continue() -> None:
    state = PromptLoader(prompt_set(5), prompts_per_step=2, seed=0).state_dict()
    other = PromptLoader(prompt_set(5, offset=1), prompts_per_step=2, seed=1)
    with pytest.raises(UserError, match=r"run\.seed, data\.prompts changed since the checkpoint"):
        other.load_state_dict(state)
    del state["carried"]
    with pytest.raises(UserError, match="the data position lacks carried"):
        PromptLoader(prompt_set(5), prompts_per_step=2, seed=0).load_state_dict(state)


def test_too_few_prompts() -> None:
    with pytest.raises(UserError, match=r"rollout\.prompts_per_step=4: .* has only 3 prompts"):
        PromptLoader(prompt_set(3), prompts_per_step=4, seed=0)
