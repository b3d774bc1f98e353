"""The invariants: what holds passes, what does not is said, and NaN never passes."""

import logging
import math

import pytest
import torch

from rlhf_megatron.batch import RaggedBatch, from_sequences
from rlhf_megatron.checks import (
    InvariantError,
    check_finite,
    check_first_update,
    check_parity,
    check_reference,
)
from rlhf_megatron.engine.model_engine import StepResult
from rlhf_megatron.reshard.config import ParityConfig


def step(ratio: float, kl: float) -> StepResult:
    metrics = {"ppo/ratio_mean": ratio, "ppo/approx_kl": kl}
    return StepResult(grad_norm=1.0, updated=True, metrics=metrics)


def batch(**differences: list[float]) -> RaggedBatch:
    """A batch whose fields lie `differences` below old_logprobs."""
    count = len(next(iter(differences.values())))
    found = from_sequences([[1]], responses=[[2] * count])
    found.response["old_logprobs"] = torch.full((count,), -1.0)
    for name, values in differences.items():
        found.response[name] = -1.0 - torch.tensor(values)
    found.sample["weight_versions"] = torch.zeros(1, dtype=torch.int64)
    return found


@pytest.mark.parametrize(
    ("ratio", "kl", "precision", "passes"),
    [
        (1.0, 0.0, "fp32", True),
        (1 + 5e-6, 5e-9, "fp32", True),
        (1 + 1e-4, 0.0, "fp32", False),
        (1.0, 1e-6, "fp32", False),
        (1.005, 5e-4, "bf16", True),
        (0.95, 0.0, "bf16", False),
        (math.nan, 0.0, "bf16", False),
        (1.0, math.nan, "fp32", False),
        (0.0, 0.0, "fp32", True),  # no token counted: all responses of the mini-batch masked
        (0.0, 0.1, "fp32", False),
    ],
)
def test_first_update(ratio, kl, precision, passes):
    if passes:
        check_first_update(step(ratio, kl), precision=precision)
        return
    with pytest.raises(InvariantError, match="first mini-batch"):
        check_first_update(step(ratio, kl), precision=precision)


@pytest.mark.parametrize(
    ("differences", "precision", "passes"),
    [
        ([0.0, 5e-5], "fp32", True),
        ([0.0, -4e-4], "fp32", False),
        ([0.01, -0.01], "bf16", True),
        ([0.0, 0.3], "bf16", False),
        ([0.0, math.nan], "bf16", False),
        ([], "fp32", True),
    ],
)
def test_reference(differences, precision, passes):
    given = batch(ref_logprobs=differences)
    if passes:
        check_reference(given, precision=precision)
        return
    with pytest.raises(InvariantError, match="actor and reference"):
        check_reference(given, precision=precision)


def test_parity_gives_the_metrics_and_holds_the_bounds():
    config = ParityConfig(logprob_abs_diff_max=0.5, logprob_abs_diff_mean=0.2)
    metrics = check_parity(
        batch(rollout_logprobs=[0.25, -0.125, 0.0]), config=config, precision="fp32", version=0
    )
    assert metrics == {
        "parity/logprob_abs_diff_mean": pytest.approx(0.125),
        "parity/logprob_abs_diff_max": pytest.approx(0.25),
    }


@pytest.mark.parametrize(
    "differences", [[0.6, 0.0, 0.0, 0.0], [0.3, 0.3], [math.nan, 0.0]], ids=["max", "mean", "nan"]
)
@pytest.mark.parametrize("action", ["stop", "warn"])
def test_a_breach_of_parity(differences, action, caplog):
    config = ParityConfig(logprob_abs_diff_max=0.5, logprob_abs_diff_mean=0.2, action=action)
    given = batch(rollout_logprobs=differences)
    if action == "stop":
        with pytest.raises(InvariantError, match="trainer and rollout engine disagree"):
            check_parity(given, config=config, precision="fp32", version=0)
        return
    with caplog.at_level(logging.WARNING):
        metrics = check_parity(given, config=config, precision="fp32", version=0)
    assert "disagree" in caplog.text
    assert set(metrics) == {"parity/logprob_abs_diff_mean", "parity/logprob_abs_diff_max"}


def test_parity_defaults_depend_on_the_precision():
    given = batch(rollout_logprobs=[0.04, -0.02])
    check_parity(given, config=ParityConfig(), precision="bf16", version=0)
    with pytest.raises(InvariantError):
        check_parity(given, config=ParityConfig(), precision="fp32", version=0)


def test_parity_bounds_hold_for_the_present_weights_alone():
    """Two tokens of version 3, then three of version 5."""
    config = ParityConfig(logprob_abs_diff_max=0.5, logprob_abs_diff_mean=0.4)
    given = from_sequences([[1], [1]], responses=[[2, 2], [2, 2, 2]])
    given.sample["weight_versions"] = torch.tensor([3, 5])
    given.response["old_logprobs"] = torch.zeros(5)
    given.response["rollout_logprobs"] = torch.tensor([0.9, -0.9, 0.25, 0.0, 0.125])
    metrics = check_parity(given, config=config, precision="fp32", version=5)
    assert metrics["parity/logprob_abs_diff_max"] == pytest.approx(0.9)
    assert metrics["parity/logprob_abs_diff_mean"] == pytest.approx(2.175 / 5)
    check_parity(given, config=config, precision="fp32", version=7)  # none is present
    with pytest.raises(InvariantError, match=r"max 0\.9 .*mean 0\.9"):
        check_parity(given, config=config, precision="fp32", version=3)


def test_finite():
    metrics = {"a": 1.0, "b": math.nan, "c": -math.inf, "d": math.nan}
    check_finite(metrics, names=("a", "missing"))
    with pytest.raises(RuntimeError, match=r"b=nan, c=-inf;"):
        check_finite(metrics, names=("a", "b", "c"))
