"""Runs whose engines lag behind the actor, and what the check before step 1 leaves as it was."""

import importlib.util
import json
from pathlib import Path

import pytest
from pool import run_program

ROOT = Path(__file__).parents[2]
STEPS = 6


def make_quickstart(folder: Path) -> None:
    """The model and the data of the quickstart, as its tool makes them."""
    path = ROOT / "tools" / "make_quickstart.py"
    spec = importlib.util.spec_from_file_location("make_quickstart", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--output", str(folder)]) == 0


def train(folder: Path, name: str, *overrides: str) -> str:
    """The quickstart on two ranks with transformers as the engine; what it printed."""
    data = folder / "data"
    words = [
        *("--config", f"{ROOT}/configs/quickstart_cpu.yaml", f"run.output_dir={folder}/{name}"),
        f"actor.model={data}/model",
        f"data.prompts={data}/train.jsonl",
        f"evaluation.prompts={data}/heldout.jsonl",
        f"warmup.demonstrations={data}/demonstrations.jsonl",
        *("warmup.steps=10", "rollout.engine=hf", "rollout.tensor_parallel_size=1"),
        *("rollout.prompts_per_step=8", "ppo.mini_batch_samples=16"),
        *("actor.parallel.pipeline_model_parallel_size=1", "evaluation.max_prompts=4"),
        *("critic.parallel.pipeline_model_parallel_size=1", "export.final=false"),
        *("ref.parallel.pipeline_model_parallel_size=1", "reshard.interval=2"),
        *("evaluation.interval_steps=5", "ppo.importance_sampling.cap=1.02"),
        "actor.optimizer.learning_rate=5e-3",
        f"reward.function={ROOT}/configs/rewards/quickstart.py:reward",
        *overrides,
    ]
    (folder / name).with_suffix(".said").mkdir()
    ends = run_program(words, world_size=2, folder=(folder / name).with_suffix(".said"))
    assert [end.exit_code for end in ends] == [0, 0], ends[0].stderr + ends[1].stderr
    return ends[0].stdout


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("off_policy")
    make_quickstart(path / "data")
    return path


@pytest.fixture(scope="module")
def lagging(folder: Path) -> tuple[Path, str]:
    """A sync every second step, and before the evaluation after step 5."""
    output = train(folder, "lagging", f"run.steps={STEPS}")
    return folder / "lagging", output


def test_engines_lag_between_the_syncs_and_never_at_an_evaluation(lagging) -> None:
    metrics = metrics_of(lagging[0])
    # Synced after steps 2, 4, 5 (evaluation) and 6; the sync before step 1 is version 0.
    lags = [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert [line["off_policy/weight_version_lag_max"] for line in metrics] == lags
    assert [line["off_policy/weight_version_lag_mean"] for line in metrics] == lags
    synced = [line["reshard/bytes_received"] > 0 for line in metrics]
    assert synced == [False, True, False, True, True, True]
    assert all("time/reshard_seconds" in line for line in metrics)
    versions = [
        {json.loads(row)["weight_version"] for row in path.read_text().splitlines()}
        for path in sorted((lagging[0] / "rollouts").iterdir())
    ]
    assert versions == [{0}, {0}, {2}, {2}, {4}, {5}]


def test_what_lags_is_measured_and_does_not_trip_the_parity_bounds(lagging) -> None:
    for line in metrics_of(lagging[0]):
        if line["off_policy/weight_version_lag_max"] == 0:
            assert line["parity/logprob_abs_diff_max"] <= 1e-3
            assert line["off_policy/is_weight_max"] == pytest.approx(1, abs=1e-3)
            assert line["off_policy/is_clipped_fraction"] == 0
        else:
            assert line["parity/logprob_abs_diff_max"] > 1e-3
            assert line["off_policy/is_weight_max"] > 1.02
            assert 0 < line["off_policy/is_clipped_fraction"] < 1


def test_a_person_reads_what_was_checked_before_step_1(lagging) -> None:
    assert "start check: greedy tokens of 16 of 16 prompts" in lagging[1]
    assert "weight sync: in place" in lagging[1]


def test_the_start_check_leaves_the_run_as_it_is(folder: Path, lagging) -> None:
    """Every figure up to the evaluation after step 5, bit for bit, with and without it."""
    output = train(folder, "unchecked", "run.steps=5", "parity.at_start=false")
    assert "start check" in lagging[1] and "start check" not in output
    unchecked, checked = (
        [
            {key: value for key, value in line.items() if key.split("/")[0] not in MEASURED}
            for line in metrics_of(run)
        ]
        for run in (folder / "unchecked", lagging[0])
    )
    assert unchecked == checked[:5]
    assert {"reward/mean", "ppo/policy_loss", "grad_norm/actor"} <= unchecked[0].keys()
    assert "evaluation/reward_mean" in unchecked[4]


MEASURED = {"time", "train", "gpu", "memory", "reshard"}
"""Metrics of time and memory."""
