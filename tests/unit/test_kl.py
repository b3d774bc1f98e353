"""KL estimators and the adaptive coefficient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.algorithms.config import KlConfig
from rlhf_megatron.algorithms.kl import KlController, kl_controller, kl_estimate


def test_estimators_follow_their_definitions():
    p, q = torch.tensor([-1.0, -2.0, -0.5]).double(), torch.tensor([-1.5, -1.0, -0.5]).double()
    expected = {
        "k1": [0.5, -1.0, 0.0],
        "k2": [0.125, 0.5, 0.0],
        "k3": [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0, 0.0],
    }
    for estimator, values in expected.items():
        got = kl_estimate(p, ref_logprobs=q, estimator=estimator)
        torch.testing.assert_close(got.tolist(), values, rtol=1e-14, atol=1e-14)


def test_k1_and_k3_are_unbiased_over_the_exact_distribution():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 11, generator=generator, dtype=torch.float64)
    p, q = torch.log_softmax(logits, dim=-1)
    exact = (p.exp() * (p - q)).sum()
    for estimator in ("k1", "k3"):
        mean = (p.exp() * kl_estimate(p, ref_logprobs=q, estimator=estimator)).sum()
        torch.testing.assert_close(mean, exact)


def test_k2_has_the_gradient_of_the_kl():
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    reference = torch.log_softmax(second, dim=-1)

    def gradient(loss_of):
        logits = first.clone().requires_grad_()
        p = torch.log_softmax(logits, dim=-1)
        loss_of(p).backward()
        return logits.grad

    exact = gradient(lambda p: (p.exp() * (p - reference)).sum())
    sampled = gradient(
        lambda p: (p.exp().detach() * kl_estimate(p, ref_logprobs=reference, estimator="k2")).sum()
    )
    torch.testing.assert_close(sampled, exact)


def test_k3_stays_exact_for_close_policies_and_finite_for_far_ones():
    near = kl_estimate(torch.tensor([1e-4]), ref_logprobs=torch.zeros(1), estimator="k3")
    assert float(near) == pytest.approx(0.5e-8, rel=1e-2)
    far = kl_estimate(torch.tensor([-500.0]), ref_logprobs=torch.zeros(1), estimator="k3")
    assert torch.isfinite(far).all()


def controller(**changes):
    options = {"coefficient": 0.1, "adaptive": True, "target": 6.0, "horizon_samples": 1000}
    return KlController(**(options | changes))


def test_adaptive_steps_follow_the_formula():
    steered = controller()
    steered.update(6.6, num_samples=64)  # error 0.1
    assert steered.coefficient == pytest.approx(0.1 * (1 + 0.1 * 64 / 1000))
    before = steered.coefficient
    steered.update(60.0, num_samples=64)  # error clipped to 0.2
    assert steered.coefficient == pytest.approx(before * (1 + 0.2 * 64 / 1000))
    before = steered.coefficient
    steered.update(-3.0, num_samples=64)  # a sampled KL can be negative
    assert steered.coefficient == pytest.approx(before * (1 - 0.2 * 64 / 1000))


@given(
    kl=st.floats(-100, 100),
    num_samples=st.integers(0, 10**6),
    horizon=st.integers(1, 10**5),
)
def test_the_coefficient_stays_positive_and_moves_towards_the_target(kl, num_samples, horizon):
    steered = controller(horizon_samples=horizon)
    steered.update(kl, num_samples=num_samples)
    assert 0.08 - 1e-9 <= steered.coefficient <= 0.12 + 1e-9
    assert (steered.coefficient - 0.1) * (kl - 6.0) >= -1e-12


def test_fixed_and_off():
    fixed = kl_controller(KlConfig(coefficient=0.2))
    fixed.update(100.0, num_samples=64)
    fixed.update(math.nan, num_samples=64)
    assert fixed.coefficient == 0.2
    off = kl_controller(KlConfig(place="off", adaptive=True))
    off.update(100.0, num_samples=64)
    assert off.coefficient == 0.0


def test_a_kl_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="nan"):
        controller().update(math.nan, num_samples=1)


def test_state_round_trip():
    one, other = controller(), controller()
    one.update(9.0, num_samples=500)
    other.load_state_dict(one.state_dict())
    assert other == one
    with pytest.raises(KeyError):
        other.load_state_dict({})
