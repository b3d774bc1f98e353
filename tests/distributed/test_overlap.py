"""Gradients and weights that travel between replicas beneath the passes, in many buckets."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks
from roles import Shape, build_role, new_factory
from test_layout_equivalence import NUM_SAMPLES, assert_same
from updates import (
    MAX_RESPONSE_TOKENS,
    RATE,
    SEED,
    TEMPERATURE,
    Case,
    optimizer_config,
    ppo_config,
    record_rollout,
    run_updates,
)

import rlhf_megatron.engine.optimizer as engine_optimizer
from rlhf_megatron.batch import load_batch
from rlhf_megatron.ppo import PpoStep

BUCKET_ELEMENTS = 4_000
"""The smallest model has some ten times as many."""
CASES = [
    Case(name="dp2", actor=Shape(dp=2), overlaps=True),
    Case(name="tp2dp2", actor=Shape(tp=2, dp=2, sp=True), overlaps=True),
    Case(name="pp2vpp2dp2", actor=Shape(pp=2, vpp=2, dp=2), overlaps=True),
    Case(name="tp2pp2dp2", actor=Shape(tp=2, pp=2, dp=2), overlaps=True),
]


@pytest.fixture(scope="module")
def rollout(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("rollout") / "rollout.pt"
    run_ranks(1, record_rollout, path, NUM_SAMPLES)
    return path


def in_small_buckets() -> None:
    """In this process, for all models wrapped from now on."""
    plain = engine_optimizer.DistributedDataParallelConfig
    engine_optimizer.DistributedDataParallelConfig = partial(plain, bucket_size=BUCKET_ELEMENTS)


def run_in_small_buckets(rank: int, models: Path, rollout: Path, case: Case):
    in_small_buckets()
    return run_updates(rank, models, rollout, case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_updates_in_many_buckets_are_those_of_one_rank(models, rollout, case):
    (alone,) = run_ranks(1, run_updates, models, rollout, Case(name="alone"))
    traces = run_ranks(case.world_size, run_in_small_buckets, models, rollout, case)
    assert all(trace == traces[0] for trace in traces)
    assert_same(traces[0], alone, name=case.name)


def weights(engine) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in engine.model.parameters().values()])


def weights_after_updates(rank: int, models: Path, rollout: Path, late: bool, precision: str):
    """After each update of a phase, and after the phase: how many of the weights differ between
    the two replicas. And the weights at the end."""
    in_small_buckets()
    actor = build_role(
        models / "llama",
        shape=Shape(dp=2),
        factory=new_factory(),
        optimizer=replace(optimizer_config(overlaps=True), overlap_param_gather=late),
        precision=precision,
    )
    (module,) = actor._modules
    num_buckets = len(module.bucket_groups)
    ppo = PpoStep(
        ppo_config(),
        actor=actor,
        critic=None,
        ref=None,
        temperature=TEMPERATURE,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        seed=SEED,
    )
    batch = load_batch(rollout)
    plan = ppo.plan(batch, step=1)
    batch.response["old_logprobs"] = ppo.log_probs(actor, batch=batch, plan=plan[0])
    batch.response["ref_logprobs"] = batch.response["old_logprobs"].clone()
    batch.response["advantages"] = torch.randn(
        batch.num_response_tokens, generator=torch.Generator().manual_seed(1)
    )
    batch.response["importance_weights"] = torch.ones(batch.num_response_tokens)
    counts, plain = [], actor.train_step

    def differing() -> int:
        own = weights(actor)
        other = own.clone()
        dist.broadcast(other, src=0)
        return int((own != other).sum())

    def counted(*args, **options):
        result = plain(*args, **options)
        counts.append(differing())
        return result

    actor.train_step = counted
    ppo.update_actor(batch, plan=plan, learning_rate=RATE, kl_coefficient=0.0)
    after = differing()
    found = ppo.log_probs(actor, batch=batch, plan=plan[0])  # hooks are gone
    num_hooks = len(module.remove_forward_pre_hook_handles)
    return num_buckets, counts, after, num_hooks, weights(actor), found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_travel_beneath_the_next_update_and_are_whole_after_the_last(
    models, rollout, precision
):
    plain, late = (
        run_ranks(2, weights_after_updates, models, rollout, is_late, precision)
        for is_late in (False, True)
    )
    _, between, after, _, expected, logprobs = plain[1]
    assert between == [0] * 4 and after == 0
    num_buckets, between, after, num_hooks, found, found_logprobs = late[1]
    assert num_buckets > 3
    # Not yet those of the other replica: it has changed them, and they are not here.
    assert len(between) == 4 and all(count > 0 for count in between)
    assert after == 0 and num_hooks == 0
    assert torch.equal(found, expected) and torch.equal(found_logprobs, logprobs)
