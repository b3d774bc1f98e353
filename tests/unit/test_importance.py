"""Truncated importance weights against a plain loop."""

import math
import random

import pytest
import torch

from rlhf_megatron.algorithms.importance import importance_weights


@pytest.mark.parametrize("cap", [0.0, 1.0, 1.5, 100.0])
@pytest.mark.parametrize("seed", range(3))
def test_weights_and_metrics_match_a_plain_loop(cap: float, seed: int) -> None:
    rng = random.Random(seed)
    old = [-3 * rng.random() for _ in range(50)]
    rollout = [x + rng.gauss(0, 0.7) for x in old]
    mask = [float(rng.random() > 0.3) for _ in old]
    found = importance_weights(
        torch.tensor(old, dtype=torch.float64),
        rollout_logprobs=torch.tensor(rollout, dtype=torch.float64),
        loss_mask=torch.tensor(mask),
        cap=cap,
    )
    ratios = [math.exp(o - r) for o, r in zip(old, rollout, strict=True)]
    kept = [ratio for ratio, m in zip(ratios, mask, strict=True) if m]
    expected = [
        (min(ratio, cap) if cap else ratio) if m else 0.0
        for ratio, m in zip(ratios, mask, strict=True)
    ]
    assert found.weights.tolist() == pytest.approx(expected, rel=1e-12)
    clipped = [ratio for ratio in kept if cap and ratio > cap]
    assert found.metrics == pytest.approx(
        {
            "off_policy/is_weight_mean": sum(kept) / len(kept),
            "off_policy/is_weight_max": max(kept),
            "off_policy/is_clipped_fraction": len(clipped) / len(kept),
        }
    )


def test_masked_tokens_are_not_read_and_far_policies_stay_finite() -> None:
    found = importance_weights(
        torch.tensor([math.nan, 0.0, 1e4, -1e4]),
        rollout_logprobs=torch.tensor([0.0, math.inf, 0.0, 0.0]),
        loss_mask=torch.tensor([0.0, 0.0, 1.0, 1.0]),
        cap=2.0,
    )
    assert found.weights.tolist() == pytest.approx([0.0, 0.0, 2.0, 0.0], abs=1e-8)
    assert all(math.isfinite(value) for value in found.metrics.values())
    assert found.metrics["off_policy/is_clipped_fraction"] == 0.5


def test_nan_at_a_counted_token_is_not_hidden() -> None:
    found = importance_weights(
        torch.tensor([math.nan]), rollout_logprobs=torch.zeros(1), loss_mask=torch.ones(1), cap=2.0
    )
    assert found.weights.isnan().all()


def test_no_token_counts() -> None:
    for size in (0, 3):
        found = importance_weights(
            torch.zeros(size),
            rollout_logprobs=torch.zeros(size),
            loss_mask=torch.zeros(size),
            cap=2.0,
        )
        assert not found.weights.any()
        assert found.metrics["off_policy/is_weight_mean"] == 1.0
