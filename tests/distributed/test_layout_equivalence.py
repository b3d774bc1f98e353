"""Layouts and micro-batches do not change the mathematics: the first updates from one recorded
rollout are the same in all of them, and those of a plain loop over transformers."""

from pathlib import Path

import pytest
from pool import run_ranks
from roles import Shape
from updates import (
    NUM_ROUNDS,
    Case,
    Trace,
    epoch_plans,
    record_rollout,
    run_plain,
    run_updates,
)

from rlhf_megatron.algorithms.config import ImportanceSamplingConfig, KlConfig

NUM_SAMPLES = 24
COMPARED = (
    "ppo/policy_loss",
    "critic/value_loss",
    "ppo/approx_kl",
    "ppo/entropy",
    "ppo/clip_fraction",
    "grad_norm/actor",
    "grad_norm/critic",
)
COMPARED_ROUNDS = (
    "kl/mean",
    "kl/coef",
    "critic/explained_variance",
    "off_policy/is_weight_mean",
    "off_policy/is_weight_max",
)
SMALLEST = {"kl/mean": 1e-4}
"""Absolute bounds, 1e-6 elsewhere: kl/mean is a sum of tens of differences that cancel."""

EIGHT = Shape(tp=2, pp=2, dp=2)
CASES = [
    Case(name="tp2", actor=Shape(tp=2)),
    Case(name="tp2sp", actor=Shape(tp=2, sp=True)),
    Case(name="pp2", actor=Shape(pp=2)),
    Case(name="pp2vpp2", actor=Shape(pp=2, vpp=2)),
    Case(name="tp2pp2", actor=Shape(tp=2, pp=2)),
    Case(name="dp2", actor=Shape(dp=2)),
    Case(name="tp2pp2dp2", actor=EIGHT),
    Case(name="dp2_overlap", actor=Shape(dp=2), overlaps=True),
    Case(name="pp2vpp2dp2_overlap", actor=Shape(pp=2, vpp=2, dp=2), overlaps=True),
    Case(name="tp2pp2dp2_overlap", actor=EIGHT, overlaps=True),
    Case(name="actor_tp2_critic_tp1", actor=Shape(tp=2), critic=Shape(dp=2)),
    Case(name="actor_pp2_critic_tp2", actor=Shape(pp=2), critic=Shape(tp=2)),
    Case(name="micro_batch_of_1", changes={"micro_batch_samples": 1}),
    Case(name="micro_batch_of_4", changes={"micro_batch_samples": 4}),
    Case(name="one_packed_micro_batch", changes={"micro_batch_tokens": 10_000}),
]


@pytest.fixture(scope="module")
def rollout(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("rollout") / "rollout.pt"
    run_ranks(1, record_rollout, path, NUM_SAMPLES)
    return path


def updates(models: Path, rollout: Path, case: Case) -> Trace:
    """The trace, which is the same on all ranks."""
    first, *others = run_ranks(case.world_size, run_updates, models, rollout, case)
    assert all(other == first for other in others)
    return first


@pytest.fixture(scope="module")
def reference(models, rollout) -> Trace:
    return updates(models, rollout, Case(name="tp1pp1dp1"))


def assert_same(trace: Trace, expected: Trace, *, name: str) -> None:
    """|a - b| <= 1e-6 + 1e-4 * |b| for all figures; prints the worst of each."""
    problems, worst = [], {}
    pairs = [(COMPARED, *pair) for pair in zip(trace.steps, expected.steps, strict=True)]
    pairs += [(COMPARED_ROUNDS, *pair) for pair in zip(trace.rounds, expected.rounds, strict=True)]
    for names, found, wanted in pairs:
        for key in (key for key in names if key in wanted and key in found):
            a, b = found[key], wanted[key]
            share = abs(a - b) / (SMALLEST.get(key, 1e-6) + 1e-4 * abs(b))
            worst[key] = max(worst.get(key, 0.0), share)
            if not share <= 1:
                problems.append(f"{key}: {a} instead of {b}")
    figures = ", ".join(f"{key} {share:.3f}" for key, share in worst.items())
    print(f"\n{name}: worst difference as a share of the bound: {figures}")
    assert len(worst) >= 6
    assert not problems, problems


def test_the_updates_are_those_of_a_plain_loop(rollout, reference):
    plans = epoch_plans(NUM_SAMPLES)
    (plain,) = run_ranks(1, run_plain, rollout, plans)
    assert_same(reference, plain, name="plain loop")


def test_the_updates_move_and_clip(reference):
    """Otherwise the comparisons below would compare little."""
    assert len(reference.steps) == NUM_ROUNDS * 2 * 2
    first = reference.steps[0]
    assert first["ppo/ratio_mean"] == 1.0 and first["ppo/approx_kl"] == 0.0
    assert max(step["ppo/approx_kl"] for step in reference.steps) > 1e-3
    for name in ("ppo/clip_fraction", "critic/value_clip_fraction"):
        assert max(step[name] for step in reference.steps) > 0.05
    assert all(step["grad_norm/actor"] > 0.01 for step in reference.steps)
    assert len({round(r["kl/coef"], 9) for r in reference.rounds}) == NUM_ROUNDS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_first_updates_are_the_same(models, rollout, reference, case):
    assert_same(updates(models, rollout, case), reference, name=case.name)


@pytest.mark.parametrize(
    "changes",
    [
        {"aggregation": "sequence_mean"},
        {"aggregation": "sequence_sum_norm", "truncated": "mask"},
        {
            "kl": KlConfig(place="loss", estimator="k3", coefficient=0.1),
            "importance_sampling": ImportanceSamplingConfig(),  # off, as by default
        },
        {"mini_batch_samples": 1, "epochs": 1},
    ],
    ids=["sequence_mean", "sequence_sum_norm_mask", "kl_loss_k3", "one_sample_for_two_replicas"],
)
def test_other_losses_at_two_replicas(models, tmp_path, changes):
    """With mini-batches of one sample one of the two replicas has none."""
    path = tmp_path / "rollout.pt"
    run_ranks(1, record_rollout, path, 4)
    alone = updates(models, path, Case(name="alone", changes=changes))
    case = Case(name=str(changes), actor=Shape(dp=2), critic=Shape(tp=2), changes=changes)
    assert_same(updates(models, path, case), alone, name=case.name)
    case = Case(name="overlap", actor=Shape(dp=2), changes=changes, overlaps=True)
    assert_same(updates(models, path, case), alone, name=f"{case.name} {changes}")
