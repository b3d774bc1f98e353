"""Roles on ranks of their own: the same training as with all roles on all ranks, and what travels.

Whole steps on recorded rollouts (placed_steps.py), without vLLM.
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from placed_steps import NUM_STEPS, Placed, PlacedTrace, run_steps
from pool import run_ranks
from roles import Shape
from updates import record_rollout

from rlhf_megatron.batch import load_batch
from rlhf_megatron.observability.ledger import merge_ledgers

NUM_SAMPLES = 24
LONGEST_SECONDS = 400.0
"""Eight processes on two busy cores take their time."""
COMPARED = (
    "ppo/policy_loss",
    "critic/value_loss",
    "grad_norm/actor",
    "grad_norm/critic",
    "critic/explained_variance",
    "kl/mean",
    "kl/coef",
    "reward/mean",
)
Four = partial(Shape, tp=2, pp=2)
Critic = partial(Shape, pp=2, dp=2)
Reference = partial(Shape, tp=2, dp=2)
TOGETHER = Placed(
    name="together",
    world_size=4,
    actor=Four(),
    critic=Critic(),
    ref=Reference(),
    rollout=(0, 1, 2, 3),
)
SPLIT = Placed(
    name="split", world_size=8, actor=Four(), critic=Critic(first=4), ref=Reference(), reward=(7,)
)
MIXED = [
    Placed(
        name="overlapping",
        world_size=6,
        actor=Four(),
        critic=Critic(first=2),
        ref=Reference(first=1),
    ),
    Placed(
        name="reference_elsewhere",
        world_size=8,
        actor=Four(),
        critic=Critic(),
        ref=Reference(first=4),
    ),
    Placed(
        name="rollout_and_reward_elsewhere",
        world_size=7,
        actor=Four(first=1),
        critic=Critic(first=2),
        ref=Reference(first=1),
        rollout=(0, 6),
        reward=(0, 3),
    ),
]


@pytest.fixture(scope="module")
def rollout(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("rollout") / "rollout.pt"
    run_ranks(1, record_rollout, path, NUM_SAMPLES)
    return path


def steps(models: Path, rollout: Path, case: Placed) -> list[PlacedTrace]:
    """Of all ranks, which know the same of the steps."""
    traces = run_ranks(
        case.world_size, run_steps, models, rollout, case, timeout_seconds=LONGEST_SECONDS
    )
    for trace in traces[1:]:
        assert trace.steps == traces[0].steps
        assert all(map(torch.equal, trace.values, traces[0].values))
    return traces


@pytest.fixture(scope="module")
def together(models, rollout) -> list[PlacedTrace]:
    return steps(models, rollout, TOGETHER)


def whole_weights(traces: list[PlacedTrace]) -> dict[tuple[str, str], torch.Tensor]:
    """(role, tensor) -> the whole of it."""
    found: dict[tuple[str, str], list] = {}
    for trace in traces:
        for role, pieces in trace.pieces.items():
            for name, slices, values in pieces:
                found.setdefault((role, name), []).append((slices, values))
    whole = {}
    for key, pieces in found.items():
        ends = torch.tensor([[where.stop for where in slices] for slices, _ in pieces])
        shape = ends.max(dim=0).values.tolist()
        whole[key] = torch.full(shape, torch.nan)
        for slices, values in pieces:
            whole[key][slices] = values
        assert not whole[key].isnan().any(), key
    return whole


def assert_same(found: list[PlacedTrace], expected: list[PlacedTrace], *, name: str) -> None:
    """|a - b| <= 1e-6 + 1e-5 * |b| for losses, norms, values and weights."""
    worst: dict[str, float] = {}

    def compare(what: str, a: torch.Tensor, b: torch.Tensor) -> None:
        share = float(((a - b).abs() / (1e-6 + 1e-5 * b.abs())).max())
        worst[what] = max(worst.get(what, 0.0), share)

    for ours, theirs in zip(found[0].steps, expected[0].steps, strict=True):
        for key in COMPARED:
            compare(key, torch.tensor(ours[key]).double(), torch.tensor(theirs[key]).double())
    for ours, theirs in zip(found[0].values, expected[0].values, strict=True):
        compare("values", ours, theirs)
    weights, wanted = whole_weights(found), whole_weights(expected)
    assert weights.keys() == wanted.keys()
    for key, values in weights.items():
        compare(f"{key[0]} weights", values, wanted[key])
    print(f"\n{name}: worst difference as a share of the bound: {worst}")
    assert max(worst.values()) <= 1, worst


def exchanged_bytes(traces: list[PlacedTrace], step: int) -> float:
    ledger = merge_ledgers([trace.ledgers[step] for trace in traces])
    return ledger.metrics()["exchange/bytes_received"]


def needed_bytes(case: Placed, rollout: Path) -> int:
    """From token ids, lengths and scalars alone."""
    batch, world = load_batch(rollout), case.world_size
    samples, responses = len(batch), batch.num_response_tokens
    ids = 4 * batch.num_tokens
    lengths = 2 * 4 * samples
    per_sample = samples * (8 + 8 + 8 + 1)  # prompt, sample, weight version; truncated
    per_token = responses * (4 + 4)  # the engine's log-prob, the mask
    gathered = (world - 1) * (ids + lengths + per_sample + per_token)
    rewards = world * 4 * samples
    outside = {role: world - shape.world_size for role, shape in case.shapes.items()}
    said = 4 * responses * sum(outside.values()) + 4 * samples * outside["critic"]
    return gathered + rewards + said


@pytest.mark.parametrize("case", [SPLIT, *MIXED], ids=lambda case: case.name)
def test_roles_elsewhere_train_the_same(models, rollout, together, case):
    found = steps(models, rollout, case)
    assert_same(found, together, name=case.name)
    # The layouts are the same, so it is the same bit by bit.
    assert all(map(torch.equal, found[0].values, together[0].values))
    for ours, theirs in zip(found[0].steps, together[0].steps, strict=True):
        assert {key: ours[key] for key in COMPARED} == {key: theirs[key] for key in COMPARED}
    assert len(found[0].steps) == NUM_STEPS
    assert exchanged_bytes(found, 0) == pytest.approx(needed_bytes(case, rollout), rel=0.01)
    phases = [{record.phase for record in trace.ledgers[0].phases} for trace in found]
    for rank, names in enumerate(phases):
        assert "exchange" in names
        assert ("update_critic" in names) == (rank in case.critic.layout.ranks)
        assert ("update_actor" in names) == (rank in case.actor.layout.ranks)
        assert ("rollout" in names) == (rank in case.rollout)


def test_together_nothing_is_told(together, rollout):
    ledger = merge_ledgers([trace.ledgers[0] for trace in together])
    assert "exchange" not in {record.phase for record in ledger.phases}
    assert exchanged_bytes(together, 0) == pytest.approx(needed_bytes(TOGETHER, rollout), rel=0.01)
