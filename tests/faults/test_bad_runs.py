"""Whole runs with a bad step: skipped, or the end of the run, with the batch kept for a look."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_run import Job, metrics, settings

from rlhf_megatron.batch import load_batch


@dataclass(frozen=True, kw_only=True)
class Plant:
    """Puts NaN into one rank's gradient, or one of its weights, as it enters a phase."""

    what: str
    phase: str
    step: int
    rank: int

    def install(self, rank: int) -> None:
        """In the process of `rank`, before the program starts."""
        if rank != self.rank:
            return
        from rlhf_megatron.trainer import Trainer

        plain, plant = Trainer.__init__, self

        def with_listener(trainer: Any, *args: Any, **options: Any) -> None:
            plain(trainer, *args, **options)
            trainer.ledger.listeners.insert(0, Listener(plant, trainer))

        Trainer.__init__ = with_listener  # type: ignore[method-assign]


class Listener:
    def __init__(self, plant: Plant, trainer: Any) -> None:
        self.plant, self.trainer = plant, trainer
        self.hook: Any = None

    def phase_entered(self, *, step: int, phase: str) -> None:
        if (step, phase) != (self.plant.step, self.plant.phase):
            return
        parameter = next(
            p
            for n, p in self.trainer.actor.model.parameters().items()
            if n.endswith("mlp.linear_fc1.weight")
        )
        if self.plant.what == "gradient":
            self.hook = parameter.register_hook(lambda gradient: gradient * math.nan)
        else:
            parameter.data[0, 0] = math.nan

    def phase_exited(self, record: Any) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None


def two_ranks(files: Path, folder: Path, **changes: Any) -> list[str]:
    """TP2 on 2 ranks, 3 steps of 4 updates a role."""
    plain: dict[str, Any] = {
        f"{role}__parallel__pipeline_model_parallel_size": 1 for role in ("actor", "critic", "ref")
    }
    plain |= {"engine": "hf", "warmup__steps": 0, "run__steps": 3, "evaluation__prompts": ""}
    return settings(files, output=folder / "run", **(plain | changes))


def run(words: list[str], folder: Path, plant: Plant | None = None) -> tuple[list[int], str]:
    job = Job(words, logs=folder / "logs", world_size=2, trigger=plant)  # type: ignore[arg-type]
    return job.wait(), job.text()


def test_a_skipped_step_is_counted_and_the_run_goes_on(files, tmp_path):
    words = two_ranks(files, tmp_path, faults__bad_step="skip")
    plant = Plant(what="gradient", phase="update_actor", step=2, rank=1)
    codes, text = run(words, tmp_path, plant)
    assert codes == [0, 0], text
    lines = metrics(tmp_path / "run")
    assert [line["faults/skipped_updates"] for line in lines] == [0, 4, 0]
    assert [line["faults/bad_steps"] for line in lines] == [0, 1, 1]
    assert all("nonfinite" not in line for line in lines)
    assert text.count("skipped: update_actor of step 2, update ") == 4
    path = tmp_path / "run" / "bad_batches" / "step_000002_update_actor_001.pt"
    assert len(load_batch(path)) == 6
    state = json.loads((tmp_path / "run/checkpoints/step_000003/state.json").read_text())
    assert state["parts"]["bad_steps"]["bad_steps"] == 1


def test_by_default_a_bad_step_ends_the_run(files, tmp_path):
    plant = Plant(what="gradient", phase="update_actor", step=2, rank=1)
    codes, text = run(two_ranks(files, tmp_path), tmp_path, plant)
    assert codes == [1, 1], text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: bad step on all ranks in update_actor of step 2, update 1 of 4:")
    assert "the gradient on rank 1 is not finite" in line and "Traceback" not in text
    assert (tmp_path / "run/bad_batches/step_000002_update_actor_001.pt").exists()
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_000001\n"


def test_a_spoilt_weight_is_named_and_reaches_no_checkpoint(files, tmp_path):
    plant = Plant(what="weight", phase="log_prob", step=2, rank=0)
    codes, text = run(two_ranks(files, tmp_path, faults__bad_step="skip"), tmp_path, plant)
    assert codes == [1, 1], text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: weights are not finite in step 2, before its updates, on 1 rank")
    assert "rank 0: actor: decoder.layers.0.mlp.linear_fc1.weight (1 of " in line
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_000001\n"


REWARDS = """
import time
def score(prompt, response, **fields):
    if prompt.startswith("t3 "):
        return float("nan")
    if prompt.startswith("t5 "):
        time.sleep(60)
    if prompt.startswith("t7 "):
        raise ValueError("planted")
    return float(len(response))
"""


def test_rewards_that_fail_get_a_value_and_are_counted(files, tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS)
    words = two_ranks(
        files,
        tmp_path,
        run__steps=1,
        rollout__prompts_per_step=16,
        ppo__mini_batch_samples=8,
        reward__function=f"{tmp_path}/rewards.py:score",
        reward__on_error="value",
        reward__error_value=-3.5,
        reward__timeout_seconds=1.0,
    )
    codes, text = run(words, tmp_path)
    assert codes == [0, 0], text
    (line,) = metrics(tmp_path / "run")
    assert (line["faults/reward_failures"], line["reward/dropped"]) == (6, 0)
    rows = (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert [json.loads(row)["reward"] for row in rows].count(-3.5) == 6
