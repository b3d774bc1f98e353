"""Whole runs resumed in other ways: elsewhere, otherwise laid out, from another checkpoint."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open
from tiny_run import (
    STEPS,
    Job,
    assert_same_run,
    metrics,
    run_to_the_end,
    settings,
    weights,
)

ROOT = Path(__file__).parents[2]
LAST, BEFORE = f"checkpoints/step_{STEPS:06d}", f"checkpoints/step_{STEPS - 1:06d}"


def test_a_flipped_byte_is_exit_code_2_and_the_checkpoint_before_goes_on(files, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    path = run / LAST / "actor/weights/__2_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 16
    path.write_bytes(content)
    job = Job(settings(files, output=run), logs=tmp_path / "refused")
    assert job.wait() == [2] * 4, job.text()
    assert job.text().count("error: ") == 1
    assert f"{LAST}: not a complete, undamaged checkpoint: 1 problem" in job.text()
    assert "actor/weights/__2_0.distcp: damaged" in job.text()
    words = settings(files, output=run, checkpoint__resume=run / BEFORE)
    run_to_the_end(words, logs=tmp_path / "resumed")
    assert_same_run(run, expected=whole)


def test_another_layout_and_another_folder_go_on_and_say_what_differs(files, whole, tmp_path):
    words = settings(
        files,
        output=tmp_path / "run",
        checkpoint__resume=whole / BEFORE,
        checkpoint__final="false",
        checkpoint__interval_steps=0,
        actor__optimizer__learning_rate=5e-4,
        actor__parallel__tensor_model_parallel_size=1,
        critic__parallel__pipeline_model_parallel_size=1,
    )
    job = run_to_the_end(words, logs=tmp_path / "logs")
    said = job.text()
    assert "resuming from " in said and f"step_{STEPS - 1:06d}, step {STEPS - 1} (" in said
    assert "actor.optimizer.learning_rate changed since: 0.001 -> 0.0005" in said
    assert "(TP2 PP2 DP1 on 4 ranks; now actor TP1 PP2 DP2, critic TP2 PP1 DP2 on 4)" in said
    assert "the random generators restart" in said
    found, expected = metrics(tmp_path / "run"), metrics(whole)
    assert [line["step"] for line in found] == [STEPS]
    rollouts = [
        [json.loads(line) for line in (run / f"rollouts/step_{STEPS:06d}.jsonl").open()]
        for run in (tmp_path / "run", whole)
    ]
    prompts = [[(row["prompt_id"], row["sample_index"]) for row in rows] for rows in rollouts]
    assert prompts[0] == prompts[1]  # the order of the prompts goes on
    for name in ("reward/mean", "kl/coef", "critic/value_loss"):
        assert abs(found[0][name] - expected[-1][name]) < 1e-4, name


def test_a_finished_run_started_again_has_nothing_to_do(files, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "hf")
    run_to_the_end(settings(files, output=run), logs=tmp_path / "again")
    assert_same_run(run, expected=whole)


def test_another_model_is_refused_by_what_differs(files, whole, tmp_path):
    words = settings(
        files,
        output=tmp_path / "run",
        checkpoint__resume=whole / LAST,
        actor__model=files / "other_model",
    )
    job = Job(words, logs=tmp_path / "refused")
    assert job.wait() == [2] * 4, job.text()
    assert job.text().count("error: ") == 1
    assert "another actor model: hidden_size 64 -> 48" in job.text()
    assert "another critic model: hidden_size 64 -> 48" in job.text()


def test_a_training_checkpoint_exports_as_the_run_did(whole, tmp_path):
    command = [
        *(sys.executable, "tools/megatron_to_hf.py", "--checkpoint", str(whole / LAST)),
        *("--role", "actor", "--output", str(tmp_path / "hf"), "--nproc-per-node", "1"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="np") as file:
        exported = {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
    assert exported == weights(whole)
