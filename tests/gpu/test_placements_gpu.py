"""Roles on ranks of their own, one step off policy, and both heads on one model, over NCCL."""

import json

import pytest
from test_training_gpu import ONE_RANK, quickstart, run

__all__ = ["quickstart"]
SPLIT = (
    "placement=[{ranks: 0, roles: [actor, ref, rollout]}, {ranks: 1, roles: [critic]}, "
    "{ranks: 0-1, roles: [reward]}]"
)
VLLM = [
    "rollout.engine=vllm",
    "rollout.tensor_parallel_size=1",
    "warmup.steps=0",
    "rollout.sleep_residual_gb=140",  # what the other process has on the GPU that they may share
]
SHARED = ["critic.shared_backbone=true", "critic.optimizer.learning_rate=5e-6"]
NOT_TRAINED = ["actor.optimizer.learning_rate=0", "critic.optimizer.learning_rate=0"]
EQUAL = ("reward/mean", "critic/value_loss", "grad_norm/actor", "grad_norm/critic", "kl/mean")
TOLERANCE = 0.02
"""bf16 has 8 bits; kernels that add by atomics do not give the same twice."""


def test_a_critic_on_a_gpu_of_its_own_is_the_colocated_one(quickstart, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    options = [*ONE_RANK, *VLLM, *NOT_TRAINED, "run.steps=2"]
    here = run(quickstart, tmp_path / "here", options, num_processes=1)
    split = run(quickstart, tmp_path / "split", [*options, SPLIT], num_processes=2)
    for own, other in zip(here, split, strict=True):
        for name in EQUAL:
            print(name, own[name], other[name])
            assert other[name] == pytest.approx(own[name], rel=TOLERANCE, abs=1e-3), name
    trace = json.loads((tmp_path / "split/trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} >= {0, 1}


def test_one_step_off_policy_trains_beside_the_rollout(quickstart, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    options = [*ONE_RANK, *VLLM, SPLIT, "pipeline.depth=1", "ppo.importance_sampling.cap=2"]
    metrics = run(quickstart, tmp_path / "run", options, num_processes=2)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert [line["off_policy/weight_version_lag_max"] for line in metrics] == [0, 1, 1, 1]
    for line in metrics:
        assert line["grad_norm/actor"] > 0 and line["grad_norm/critic"] > 0


@pytest.mark.parametrize("num_processes", [1, 2])
def test_both_heads_train_on_one_model(quickstart, tmp_path, num_processes):
    """Two processes: two replicas, each with an engine."""
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    options = [*ONE_RANK, *VLLM, *SHARED]
    metrics = run(quickstart, tmp_path / "run", options, num_processes=num_processes)
    for line in metrics:
        assert line["grad_norm/actor"] > 0 and line["critic/value_loss"] > 0
        assert line["parity/logprob_abs_diff_mean"] <= 0.05
