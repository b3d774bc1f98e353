"""Checkpoints on a GPU: pinned copies, the moments gathered and handed out through NCCL."""

import shutil

import pytest
from test_training_gpu import ONE_RANK, quickstart, run

__all__ = ["quickstart"]
TWO_REPLICAS = [
    f"{role}.parallel.{key}"
    for role in ("actor", "critic", "ref")
    for key in ("tensor_model_parallel_size=2", "pipeline_model_parallel_size=1")
]
SAVING = [
    "warmup.steps=10",
    "rollout.engine=hf",
    "rollout.tensor_parallel_size=1",
    "checkpoint.interval_steps=2",
    "checkpoint.keep_last=5",
]
TOLERANCE = 0.1
"""Of the mean reward of a step; sums on a GPU are not the same bits twice."""


@pytest.mark.parametrize("layout", [ONE_RANK, TWO_REPLICAS], ids=["one_rank", "tp2_dp2"])
def test_a_resumed_run_goes_on_as_the_one_that_was_not_stopped(quickstart, tmp_path, layout):
    num_processes = 1 if layout is ONE_RANK else 4
    whole = run(quickstart, tmp_path / "run", [*SAVING, *layout], num_processes=num_processes)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    resume = f"checkpoint.resume={tmp_path}/again/checkpoints/step_000002"
    again = run(
        quickstart, tmp_path / "again", [*SAVING, *layout, resume], num_processes=num_processes
    )
    assert [line["step"] for line in again] == [line["step"] for line in whole] == [1, 2, 3, 4]
    assert again[:2] == whole[:2]
    for before, after in zip(whole[2:], again[2:], strict=True):
        assert abs(before["reward/mean"] - after["reward/mean"]) <= TOLERANCE
        assert after["kl/coef"] == before["kl/coef"]
        assert after["lr/actor"] == before["lr/actor"]


def test_the_layout_may_change_between_start_and_resume(quickstart, tmp_path):
    run(quickstart, tmp_path / "run", [*SAVING, *TWO_REPLICAS, "run.steps=2"], num_processes=4)
    metrics = run(
        quickstart,
        tmp_path / "run",
        [*SAVING, *ONE_RANK, "checkpoint.resume=auto"],
        num_processes=1,
    )
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert all(line["grad_norm/actor"] > 0 for line in metrics)
