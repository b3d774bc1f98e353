"""Whitening over the valid tokens of the global batch."""

import statistics

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.algorithms.whitening import whiten


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.sampled_from([0.0, 1.0])), min_size=0, max_size=30)
)
def test_whitening_matches_the_statistics_module(rows):
    values = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    mask = torch.tensor([m for _, m in rows])
    result = whiten(values, mask=mask)
    chosen = [value for value, m in rows if m]
    for (value, m), got in zip(rows, result.tolist(), strict=True):
        if not m:
            assert got == 0
            continue
        spread = (statistics.pvariance(chosen) + 1e-8) ** 0.5
        assert abs(got - (value - statistics.fmean(chosen)) / spread) < 1e-6


def test_masked_garbage_is_not_read():
    values = torch.tensor([1.0, float("nan"), 3.0, float("inf")])
    result = whiten(values, mask=torch.tensor([1.0, 0, 1, 0]))
    torch.testing.assert_close(result, torch.tensor([-1.0, 0, 1, 0]))


def test_no_or_one_valid_token_and_equal_values():
    assert whiten(torch.zeros(0), mask=torch.zeros(0)).shape == (0,)
    assert whiten(torch.tensor([5.0, 7.0]), mask=torch.zeros(2)).tolist() == [0, 0]
    assert whiten(torch.tensor([5.0, 7.0]), mask=torch.tensor([0.0, 1])).tolist() == [0, 0]
    assert whiten(torch.full((4,), 0.3), mask=torch.ones(4)).abs().max() < 1e-3


def test_the_moments_are_taken_in_float64():
    # In float32 the mean of these loses the digits that the deviations live in.
    values = 1e5 + torch.arange(1000.0) * 0.01
    result = whiten(values, mask=torch.ones(1000)).double()
    assert abs(float(result.mean())) < 1e-6
    assert abs(float(result.std(correction=0)) - 1) < 1e-6
