"""Runs whose engines lag behind the actor, and what the check before step 1 leaves as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 6


def train(folder: Path, *overrides: str) -> str:
    """The quickstart on two ranks with transformers as the engine; what it printed."""
    data = folder / "data"
    if not data.exists():
        subprocess.run(
            [sys.executable, "tools/make_quickstart.py", "--output", str(data)],
            cwd=ROOT,
            check=True,
        )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rlhf_megatron.cli", "train", "--nproc-per-node", "2"),
            *("--config", "configs/quickstart_cpu.yaml"),
            f"actor.model={data}/model",
            f"data.prompts={data}/train.jsonl",
            f"evaluation.prompts={data}/heldout.jsonl",
            f"warmup.demonstrations={data}/demonstrations.jsonl",
            *("warmup.steps=10", "rollout.engine=hf", "rollout.tensor_parallel_size=1"),
            *("rollout.prompts_per_step=8", "ppo.mini_batch_samples=16"),
            *("actor.parallel.pipeline_model_parallel_size=1", "evaluation.max_prompts=4"),
            *("critic.parallel.pipeline_model_parallel_size=1", "export.final=false"),
            "ref.parallel.pipeline_model_parallel_size=1",
            *overrides,
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("off_policy")


@pytest.fixture(scope="module")
def lagging(folder: Path) -> tuple[Path, str]:
    """A sync every second step, and before the evaluation after step 5."""
    output = train(
        folder,
        f"run.output_dir={folder}/lagging",
        f"run.steps={STEPS}",
        "evaluation.interval_steps=5",
        "reshard.interval=2",
        "ppo.importance_sampling.cap=1.02",
        "actor.optimizer.learning_rate=5e-3",
    )
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


def test_the_start_check_leaves_the_run_as_it_is(folder: Path) -> None:
    """Every figure of two steps, bit for bit, with and without it."""
    found = []
    for name in ("true", "false"):
        output = train(
            folder,
            f"run.output_dir={folder}/checked_{name}",
            "run.steps=2",
            f"parity.at_start={name}",
        )
        assert ("start check" in output) == (name == "true")
        found.append(
            [
                {key: value for key, value in line.items() if key.split("/")[0] not in MEASURED}
                for line in metrics_of(folder / f"checked_{name}")
            ]
        )
    assert found[0] == found[1]
    assert {"reward/mean", "ppo/policy_loss", "grad_norm/actor"} <= found[0][0].keys()


MEASURED = {"time", "train", "gpu", "memory", "reshard"}
"""Metrics of time and memory."""
