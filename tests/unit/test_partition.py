"""Mini-batches, balanced shares and packing: properties and a brute-force optimum."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.algorithms.minibatch import mini_batches
from rlhf_megatron.algorithms.partition import balanced_partition, pack, pack_for_ranks

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


@given(st.integers(0, 200), st.integers(1, 50), st.integers(0, 2**40))
def test_mini_batches_cover_all_samples_evenly(num_samples, mini_batch_samples, seed):
    batches = mini_batches(num_samples, mini_batch_samples=mini_batch_samples, seed=seed)
    assert sorted(itertools.chain(*batches)) == list(range(num_samples))
    assert len(batches) == math.ceil(num_samples / mini_batch_samples)
    sizes = {len(batch) for batch in batches}
    assert not sizes or (max(sizes) - min(sizes) <= 1 and max(sizes) <= mini_batch_samples)
    assert batches == mini_batches(num_samples, mini_batch_samples=mini_batch_samples, seed=seed)


def test_mini_batches_are_shuffled_by_the_seed():
    orders = {tuple(mini_batches(20, mini_batch_samples=20, seed=s)[0]) for s in range(50)}
    assert len(orders) == 50
    first = [mini_batches(4, mini_batch_samples=4, seed=s)[0][0] for s in range(2000)]
    assert all(400 < first.count(value) < 600 for value in range(4))


@given(LENGTHS, st.integers(1, 8))
def test_a_partition_is_one_and_is_balanced(costs, num_parts):
    parts = balanced_partition(costs, num_parts=num_parts)
    assert len(parts) == num_parts
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    sums = [sum(costs[i] for i in part) for part in parts]
    assert max(sums) - min(sums) <= max(costs, default=0)
    if len(costs) >= num_parts:
        assert all(parts)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_the_partition_keeps_grahams_bound_on_the_best(costs, num_parts):
    parts = balanced_partition(costs, num_parts=num_parts)
    largest = max(sum(costs[i] for i in part) for part in parts)
    best = min(
        max(
            sum(c for c, p in zip(costs, choice, strict=True) if p == part)
            for part in range(num_parts)
        )
        for choice in itertools.product(range(num_parts), repeat=len(costs))
    )
    assert largest <= (4 / 3 - 1 / (3 * num_parts)) * best + 1e-9


@given(LENGTHS, st.integers(1, 60), st.integers(0, 5))
def test_packs_keep_the_budget(lengths, tokens, samples):
    packs = pack(lengths, micro_batch_tokens=tokens, micro_batch_samples=samples)
    assert sorted(itertools.chain(*packs)) == list(range(len(lengths)))
    for members in packs:
        assert members == sorted(members) and members
        assert len(members) == 1 or sum(lengths[i] for i in members) <= tokens
        assert not samples or len(members) <= samples
    if not samples:
        # First-fit never leaves two micro-batches that would fit into one.
        sums = [sum(lengths[i] for i in members) for members in packs]
        assert all(a + b > tokens for a, b in itertools.combinations(sums, 2))


def test_pack_by_example():
    lengths = [3, 9, 4, 5, 20, 1]
    assert pack(lengths, micro_batch_tokens=10) == [[4], [1, 5], [2, 3], [0]]
    assert pack(lengths, micro_batch_tokens=1) == [[4], [1], [3], [2], [0], [5]]
    assert pack([2, 2, 2], micro_batch_tokens=100, micro_batch_samples=2) == [[0, 1], [2]]
    assert pack([], micro_batch_tokens=10) == []


@given(st.lists(LENGTHS, min_size=1, max_size=5), st.integers(1, 60))
def test_all_ranks_get_the_same_number_of_micro_batches(lengths_by_rank, tokens):
    packed = pack_for_ranks(lengths_by_rank, micro_batch_tokens=tokens)
    alone = [pack(lengths, micro_batch_tokens=tokens) for lengths in lengths_by_rank]
    most = max(len(packs) for packs in alone)
    assert [len(packs) for packs in packed] == [most] * len(lengths_by_rank)
    for packs, own in zip(packed, alone, strict=True):
        assert packs[: len(own)] == own
        assert packs[len(own) :] == [[]] * (most - len(own))


@pytest.mark.parametrize("num_parts", [1, 4, 7])
def test_many_samples_balance_to_a_fraction_of_a_percent(num_parts):
    costs = [(i * 7919) % 1000 + 24 for i in range(1024)]
    sums = [sum(costs[i] for i in part) for part in balanced_partition(costs, num_parts=num_parts)]
    assert max(sums) / (sum(costs) / num_parts) < 1.002
