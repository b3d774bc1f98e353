"""Whole runs of random settings: each ends well, and stopped and resumed it is the same bit by bit.

RANDOM_RUNS=100-199 takes those draws in place of a few.
"""

import math
import os
from random import Random

import pytest
from random_settings import draw, make_families
from tiny_run import Job, Trigger, assert_same_run, metrics, run_to_the_end, settings

first, _, last = os.environ.get("RANDOM_RUNS", "1-4").partition("-")
SEEDS = range(int(first), int(last or first) + 1)
STEPS = 3
TIMED = ("reward/scored_in_rollout",)
"""How many scores were there before the rollout's end depends on the machine."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    make_families(folder)
    return folder


def draw_stop(seed, changes):
    """SIGTERM in a phase of the actor, which rank 0 always has."""
    phase = Random(seed).choice(("log_prob", "update_actor", "reshard"))
    is_late = changes.get("ppo__critic_warmup_steps") and phase == "update_actor"
    return Trigger(phase=phase, step=2 if is_late else 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_stopped_run_of_any_settings_is_the_one_that_never_was(files, models, tmp_path, seed):
    world_size, changes = draw(seed)
    changes = {"run__steps": STEPS, "run__overwrite": False, "engine": "hf"} | changes
    changes["actor__model"] = models / changes.pop("family")
    changes["data__tokenizer"] = files / "model"
    print(f"{world_size} ranks", changes)

    def words(name):
        return settings(files, output=tmp_path / name, **changes)

    run_to_the_end(words("whole"), logs=tmp_path / "whole_logs", world_size=world_size)
    job = Job(
        words("run"),
        logs=tmp_path / "stopped_logs",
        world_size=world_size,
        trigger=draw_stop(seed, changes),
    )
    assert set(job.wait()) == {3}, job.text()
    run_to_the_end(words("run"), logs=tmp_path / "resumed_logs", world_size=world_size)
    assert_same_run(tmp_path / "run", expected=tmp_path / "whole", ignoring=TIMED)
    for line in metrics(tmp_path / "whole"):
        wrong = [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        assert not wrong, wrong
