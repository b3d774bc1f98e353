"""Learning-rate schedules, from their documented points."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.algorithms.schedule import learning_rate


def rates(schedule, *, warmup_steps=0, total_steps=11, peak=1.0, minimum=0.0):
    return [
        learning_rate(
            step,
            peak=peak,
            minimum=minimum,
            schedule=schedule,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
        )
        for step in range(total_steps + 2)
    ]


def test_warm_up_climbs_to_the_peak_without_a_step_at_zero():
    for schedule in ("constant", "linear", "cosine"):
        climb = rates(schedule, warmup_steps=4)[:5]
        assert climb == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_constant_stays():
    assert rates("constant") == [1.0] * 13


def test_linear_and_cosine_end_at_the_minimum_on_the_last_step():
    linear = rates("linear", peak=1.0, minimum=0.5)
    assert linear[:11] == pytest.approx([1 - 0.05 * k for k in range(11)])
    assert linear[11:] == pytest.approx([0.5, 0.5])
    cosine = rates("cosine", peak=1.0, minimum=0.2)
    assert cosine[:11] == pytest.approx(
        [0.2 + 0.4 * (1 + math.cos(math.pi * k / 10)) for k in range(11)]
    )
    assert cosine[5] == pytest.approx(0.6)


def test_a_run_too_short_to_fall_keeps_the_peak():
    assert rates("linear", total_steps=1)[0] == 1.0
    assert rates("cosine", warmup_steps=3, total_steps=4)[3] == 1.0
    assert rates("linear", warmup_steps=9, total_steps=2)[:2] == pytest.approx([0.1, 0.2])


def test_rate_zero_stays_zero():
    assert set(rates("cosine", peak=0.0, warmup_steps=3)) == {0.0}


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup_steps=st.integers(0, 20),
    total_steps=st.integers(1, 40),
    minimum=st.floats(0, 1),
)
def test_the_rate_rises_then_never_rises_again(schedule, warmup_steps, total_steps, minimum):
    found = rates(schedule, warmup_steps=warmup_steps, total_steps=total_steps, minimum=minimum)
    climb, rest = found[:warmup_steps], found[warmup_steps:]
    assert climb == sorted(climb) and all(0 < rate < 1 for rate in climb)
    assert all(a >= b - 1e-12 for a, b in pairwise(rest))
    assert all(min(minimum, 1.0) - 1e-12 <= rate <= 1.0 for rate in rest)
