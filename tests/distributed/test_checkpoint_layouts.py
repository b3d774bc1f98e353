"""A run saved at one layout and resumed at another: state and next update are the same."""

import pytest
import torch
from pool import run_ranks
from roles import Shape
from saved_runs import Place, build_run, stored_tensors
from small_models import VOCAB_SIZE
from updates import Trace, record_rollout

CHAIN = [Shape(tp=2, pp=2), Shape(pp=2, dp=2), Shape(tp=2, dp=2)]
ROUNDS_BEFORE = 2
COMPARED = (
    "ppo/policy_loss",
    "critic/value_loss",
    "ppo/approx_kl",
    "ppo/entropy",
    "grad_norm/actor",
    "grad_norm/critic",
)


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    path = tmp_path_factory.mktemp("rollout") / "rollout.pt"
    run_ranks(1, record_rollout, path, 12)
    return path


def first_part(rank, place, shape) -> Trace:
    """Some rounds, a checkpoint, and one round more."""
    run = build_run(rank, place, shape)
    for _ in range(ROUNDS_BEFORE):
        run.round()
    run.save()
    return run.round()


def moved(rank, place, target, shape) -> tuple[Trace, Trace]:
    """Resume at `shape`, save what was read to `target`, and two rounds, with a checkpoint of the
    run between them."""
    run = build_run(rank, place, shape)
    run.resume()
    copy = build_run(rank, target, shape)
    copy.ppo, copy.step = run.ppo, run.step
    copy.checkpointer._run = run.checkpointer._run
    copy.checkpointer._parts = run.checkpointer._parts
    copy.save()
    after = run.round()
    run.save()
    return after, run.round()


def assert_close(found: Trace, expected: Trace) -> None:
    """|a - b| <= 1e-6 + 1e-5 * |b|."""
    assert len(found.steps) == len(expected.steps) > 0
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        for name in COMPARED:
            a, b = ours[name], theirs[name]
            assert abs(a - b) <= 1e-6 + 1e-5 * abs(b), (name, a, b)


def assert_equal_state(one, other) -> None:
    """Bit by bit, but for the rows of vocabulary padding, of which layouts have different ones."""
    one, other = stored_tensors(one), stored_tensors(other)
    assert one.keys() == other.keys()
    assert any("exp_avg_sq" in key for key in one)
    for key, tensor in one.items():
        found = other[key]
        if "word_embeddings" in key or ("actor" in key and "output_layer" in key):
            tensor, found = tensor[:VOCAB_SIZE], found[:VOCAB_SIZE]
        assert torch.equal(tensor, found), key


def test_from_layout_to_layout_the_next_update_is_the_unmoved_one(models, rollout, tmp_path):
    place = Place(models=models, rollout=rollout, output=tmp_path / "run")
    traces = run_ranks(4, first_part, place, CHAIN[0])
    expected, step = traces[0], ROUNDS_BEFORE
    for number, shape in enumerate(CHAIN[1:]):
        target = Place(models=models, rollout=rollout, output=tmp_path / f"copy_{number}")
        found = run_ranks(4, moved, place, target, shape)
        folder = f"checkpoints/step_{step:06d}"
        assert_equal_state(target.output / folder, place.output / folder)
        assert_close(found[0][0], expected)
        expected, step = found[0][1], step + 1


@pytest.mark.parametrize(
    ("actor", "shapes", "asynchronous"),
    [
        ("tied", [Shape(tp=2, pp=2), Shape(dp=4)], True),
        ("one_kv_head", [Shape(pp=2, dp=2), Shape(tp=4, sp=True)], True),
        ("qwen2", [Shape(pp=2, vpp=2, dp=2), Shape(tp=2, pp=2)], True),
        ("tied", [Shape(pp=2, dp=2), Shape(tp=2, dp=2)], False),
    ],
)
def test_bf16_master_weights_and_moments_come_back_bit_by_bit(
    models, rollout, tmp_path, actor, shapes, asynchronous
):
    """Also tied embeddings, KV heads below TP, virtual stages, an optimizer shared by replicas."""
    options = {"actor": actor, "precision": "bf16", "asynchronous": asynchronous}
    place = Place(models=models, rollout=rollout, output=tmp_path / "run", **options)
    target = Place(models=models, rollout=rollout, output=tmp_path / "copy", **options)
    run_ranks(4, first_part, place, shapes[0])
    run_ranks(4, moved, place, target, shapes[1])
    folder = f"checkpoints/step_{ROUNDS_BEFORE:06d}"
    assert_equal_state(target.output / folder, place.output / folder)
    keys = stored_tensors(place.output / folder)
    masters = [key for key in keys if "optimizer.state.param." in key]
    assert masters and all(keys[key].dtype == torch.float32 for key in masters)


def saved_often(rank, place, target, shape) -> bool:
    """Four checkpoints of a run, and one more of its last state by a checkpointer that has no plans
    yet. Whether the run's were kept."""
    run = build_run(rank, place, shape)
    for _ in range(4):
        run.round()
        run.save()
    fresh = build_run(rank, target, shape)
    fresh.ppo, fresh.step = run.ppo, run.step
    fresh.checkpointer._run = run.checkpointer._run
    fresh.checkpointer._parts = run.checkpointer._parts
    fresh.save()
    return all(plans.are_kept for plans in run.checkpointer._plans.values())


@pytest.mark.parametrize("shape", [Shape(tp=2, pp=2), Shape(pp=2, dp=2)], ids=str)
def test_with_a_kept_plan_the_checkpoint_holds_the_present_values(models, rollout, tmp_path, shape):
    place = Place(models=models, rollout=rollout, output=tmp_path / "run")
    target = Place(models=models, rollout=rollout, output=tmp_path / "fresh")
    assert run_ranks(4, saved_often, place, target, shape) == [True] * 4
    folders = [where.output / "checkpoints/step_000004" for where in (place, target)]
    one, other = (stored_tensors(folder) for folder in folders)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def unstepped(rank, place, target, shape) -> list[int]:
    """Save and resume before any update; then the optimizers are as fresh ones."""
    run = build_run(rank, place, shape)
    run.save()
    again = build_run(rank, place, shape)
    again.resume()
    states = []
    for engine in (again.ppo.actor, again.ppo.critic):
        states += [len(part.optimizer.state) for part in engine.optimizer.chained_optimizers]
    return states


def test_before_the_first_update_the_optimizer_stays_fresh(models, rollout, tmp_path):
    place = Place(models=models, rollout=rollout, output=tmp_path / "run")
    assert run_ranks(2, unstepped, place, place, Shape(tp=2)) == [[0, 0]] * 2
