"""Gradients and weights of replicas that travel beneath the passes, over NCCL."""

import pytest
from test_training_gpu import ONE_RANK, quickstart, run

__all__ = ["quickstart"]
OVERLAPS = [
    f"{role}.optimizer.overlap_{what}=true"
    for role in ("actor", "critic")
    for what in ("grad_reduce", "param_gather")
]
TOLERANCE = 0.02
"""bf16 has 8 bits; kernels that add by atomics do not give the same twice."""


def test_overlapped_updates_of_two_replicas_are_those_of_plain_ones(quickstart, tmp_path):
    """The first step, of four updates from the same samples."""
    options = [*ONE_RANK, "rollout.engine=hf", "rollout.tensor_parallel_size=1", "run.steps=1"]
    plain = run(quickstart, tmp_path / "plain", options, num_processes=2)
    overlapped = run(quickstart, tmp_path / "overlapped", [*options, *OVERLAPS], num_processes=2)
    for name in ("reward/mean", "critic/value_loss", "grad_norm/actor", "grad_norm/critic"):
        print(name, plain[0][name], overlapped[0][name])
        assert overlapped[0][name] == pytest.approx(plain[0][name], rel=TOLERANCE), name
