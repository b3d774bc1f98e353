"""Runs with the critic on a rank of its own, at either depth: a critic that dies is named, and the
run that goes on is the one that nothing has stopped, bit by bit."""

import signal
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Job, Trigger, assert_same_run, metrics, run_to_the_end, settings

WORLD_SIZE = 3
CRITIC = 2
STEPS = 4
PLACEMENT = "[{ranks: 0-1, roles: [actor, ref, rollout]}, {ranks: 2, roles: [critic]}]"
DEPTHS: dict[int, dict[str, Any]] = {
    0: {},
    1: {"pipeline__depth": 1, "ppo__importance_sampling__cap": 2},
}


def words_of(files: Path, *, output: Path, depth: int, **further: Any) -> list[str]:
    changes: dict[str, Any] = {
        "run__steps": STEPS,
        "run__overwrite": True,
        "checkpoint__asynchronous": "false",  # that of step 2 is complete when the critic dies
        "warmup__steps": 1,
        "placement": PLACEMENT,
        "critic__parallel__tensor_model_parallel_size": 1,
    }
    changes |= {
        f"{role}__parallel__pipeline_model_parallel_size": 1 for role in ("actor", "critic", "ref")
    }
    return settings(files, output=output, **(changes | DEPTHS[depth] | further))


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_dead_critic_is_named_and_the_run_goes_on_bit_by_bit(files, tmp_path, depth):
    whole = tmp_path / "whole"
    words = words_of(files, output=whole, depth=depth)
    run_to_the_end(words, logs=tmp_path / "whole_logs", world_size=WORLD_SIZE)

    run = tmp_path / "run"
    words = words_of(files, output=run, depth=depth)
    trigger = Trigger(
        phase="update_critic", step=3, rank=CRITIC, signals=(signal.SIGKILL,), seconds_before=2.0
    )
    job = Job(words, logs=tmp_path / "killed", world_size=WORLD_SIZE, trigger=trigger)
    codes = job.wait()
    assert codes[CRITIC] == -signal.SIGKILL and set(codes[:CRITIC]) == {1}, job.text()
    assert (
        f"error: rank {CRITIC} died in update_critic of step 3: its process is gone" in job.text()
    )
    assert (run / "checkpoints/step_000002/in_flight.pt").exists() == (depth == 1)

    run_to_the_end(words, logs=tmp_path / "resumed", world_size=WORLD_SIZE)
    assert_same_run(run, expected=whole)
    lags = [line["off_policy/weight_version_lag_max"] for line in metrics(run)]
    assert lags == [0.0] + [float(depth)] * (STEPS - 1)


def test_scores_made_beside_the_rollout_and_the_critics_update_change_nothing(files, tmp_path):
    runs = {}
    for workers in (0, 1):
        runs[workers] = tmp_path / f"workers_{workers}"
        words = words_of(
            files,
            output=runs[workers],
            depth=1,
            run__steps=3,
            checkpoint__interval_steps=0,
            placement=PLACEMENT.replace("rollout]", "rollout, reward]"),
            reward__workers=workers,
        )
        run_to_the_end(words, logs=tmp_path / f"logs_{workers}", world_size=WORLD_SIZE)
    plain, streamed = metrics(runs[0]), metrics(runs[1])
    assert all(line.pop("reward/workers_replaced") == 0.0 for line in streamed)
    assert all(0.0 <= line.pop("reward/scored_in_rollout") <= 12.0 for line in streamed)
    assert streamed == plain
