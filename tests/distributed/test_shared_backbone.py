"""An actor with both heads: its updates and gradients against a plain loop over transformers."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from joint_updates import (
    gradient_differences,
    prepare_gradient,
    run_joint,
    run_plain_joint,
    save_joint,
    warm_up_joint,
)
from pool import run_ranks
from roles import Shape
from test_layout_equivalence import assert_same
from updates import NUM_ROUNDS, Case, epoch_plans, record_rollout

NUM_SAMPLES = 24
SQUARES = ("difference_squared", "expected_squared")
EIGHT = Shape(tp=2, pp=2, dp=2, sp=True)
CASES = [
    Case(name="tp1pp1dp1"),
    Case(name="tp2", actor=Shape(tp=2)),
    Case(name="tp2sp", actor=Shape(tp=2, sp=True)),
    Case(name="pp2", actor=Shape(pp=2)),
    Case(name="pp2vpp2", actor=Shape(pp=2, vpp=2)),
    Case(name="tp2pp2dp2", actor=EIGHT),
    Case(name="dp2_overlap", actor=Shape(dp=2), overlaps=True),
]


@pytest.fixture(scope="module")
def joint_models(models) -> Path:
    run_ranks(1, save_joint, models, ("llama", "tied"))
    return models


@pytest.fixture(scope="module")
def rollout(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("rollout") / "rollout.pt"
    run_ranks(1, record_rollout, path, NUM_SAMPLES)
    return path


@pytest.fixture(scope="module")
def gradients(rollout, tmp_path_factory) -> dict[str, Path]:
    folders = {}
    for kind in ("llama", "tied"):
        folders[kind] = tmp_path_factory.mktemp(kind)
        run_ranks(1, prepare_gradient, rollout, kind, folders[kind])
    return folders


@pytest.fixture(scope="module")
def plain(rollout):
    plans = epoch_plans(NUM_SAMPLES)
    (trace,) = run_ranks(1, run_plain_joint, rollout, plans)
    return trace


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_updates_are_those_of_a_plain_loop(joint_models, rollout, plain, case):
    first, *others = run_ranks(case.actor.world_size, run_joint, joint_models, rollout, case)
    assert all(other == first for other in others)
    assert len(first.steps) == NUM_ROUNDS * 2 * 2
    assert_same(first, plain, name=case.name)
    assert first.steps[0]["ppo/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert max(step["critic/value_clip_fraction"] for step in first.steps) > 0.05


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_the_gradient_is_the_weighted_sum(joint_models, gradients, kind, case):
    if kind == "tied" and case.name not in ("tp2", "pp2"):
        pytest.skip("the head is the same; what differs is the last stage's copy of the embedding")
    ranks = run_ranks(
        case.actor.world_size,
        gradient_differences,
        joint_models / f"joint_{kind}",
        gradients[kind],
        case,
    )
    expected = torch.load(gradients[kind] / "gradients.pt")
    compared: Counter[str] = Counter()
    for found in ranks:
        for name, of in found.items():
            assert of.worst <= 2e-5 * of.largest, (name, of)
            compared[name] += of.count
    assert compared.keys() == expected["joint"].keys()
    for name, tensor in expected["joint"].items():
        assert compared[name] >= tensor.numel(), name
    # Otherwise the value loss would not be seen in the backbone's gradient.
    name = "model.layers.0.mlp.down_proj.weight"
    change = (expected["joint"][name] - expected["policy"][name]).norm()
    assert change > 0.2 * expected["policy"][name].norm()


@pytest.mark.parametrize("shape", [Shape(), Shape(tp=2, sp=True)], ids=str)
def test_the_gradient_in_bf16_is_near(joint_models, gradients, shape):
    ranks = run_ranks(
        shape.world_size,
        gradient_differences,
        joint_models / "joint_llama",
        gradients["llama"],
        Case(name="bf16", actor=shape),
        "bf16",
    )
    for found in ranks:
        # Rounding; a head counted once too often or too seldom would be off by half at least.
        head = found["score.weight"]
        assert head.difference_squared <= 0.2**2 * head.expected_squared
        whole = [sum(getattr(of, name) for of in found.values()) for name in SQUARES]
        assert whole[0] <= 0.2**2 * whole[1], whole


def test_a_loss_that_leaves_a_head_out_is_that_of_one_replica(joint_models):
    """With overlap a bucket waits for the gradients of all its parameters."""
    directory = joint_models / "joint_llama"
    (alone,) = run_ranks(1, warm_up_joint, directory, Case(name="alone"))
    for overlaps in (False, True):
        case = Case(name="dp2", actor=Shape(dp=2), overlaps=overlaps)
        for found in run_ranks(2, warm_up_joint, directory, case):
            assert found == pytest.approx(alone, rel=1e-5)
