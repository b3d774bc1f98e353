"""The main job as the quickstart runs it: 4 ranks at TP2 x PP2, two vLLM engines of TP2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]

METRIC_KEYS = set(
    """
    step reward/mean reward/std kl/mean kl/coef ppo/approx_kl ppo/ratio_mean ppo/clip_fraction
    ppo/entropy ppo/policy_loss critic/value_loss critic/explained_variance response/length_mean
    response/truncated_fraction parity/logprob_abs_diff_mean parity/logprob_abs_diff_max
    reshard/bytes_received reshard/bytes_minimum reshard/seconds time/step_seconds
    time/rollout_seconds time/reward_seconds time/log_prob_seconds time/ref_log_prob_seconds
    time/value_seconds time/advantage_seconds time/update_critic_seconds time/update_actor_seconds
    time/reshard_seconds train/throughput_tokens_per_sec train/mfu gpu/memory_active_gb
    memory/rollout_peak_gb memory/update_actor_peak_gb grad_norm/actor grad_norm/critic
    lr/actor lr/critic off_policy/weight_version_lag_mean off_policy/weight_version_lag_max
    padding_fraction/actor token_imbalance/actor cost_imbalance/actor
    padding_fraction/critic token_imbalance/critic cost_imbalance/critic
    off_policy/is_weight_mean off_policy/is_weight_max off_policy/is_clipped_fraction
    """.split()  # noqa: SIM905
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    folder = tmp_path_factory.mktemp("quickstart")
    data = folder / "data"
    subprocess.run(
        [sys.executable, "tools/make_quickstart.py", "--output", str(data)], cwd=ROOT, check=True
    )
    output = folder / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rlhf_megatron.cli", "train", "--nproc-per-node", "4"),
            *("--config", "configs/quickstart_cpu.yaml"),
            f"run.output_dir={output}",
            f"actor.model={data}/model",
            f"data.prompts={data}/train.jsonl",
            f"evaluation.prompts={data}/heldout.jsonl",
            f"warmup.demonstrations={data}/demonstrations.jsonl",
            "run.steps=2",
            "warmup.steps=10",
            "evaluation.interval_steps=2",
            "logging.tensorboard=true",
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (output / "stdout.txt").write_text(done.stdout)
    return output


def metrics_of(run_folder):
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_has_every_metric(run_folder):
    metrics = metrics_of(run_folder)
    assert [line["step"] for line in metrics] == [1, 2]
    for line in metrics:
        assert {key for key in METRIC_KEYS if line.get(key) is None} == set()


def test_trainer_and_vllm_agree_and_no_byte_moves_in_vain(run_folder):
    for line in metrics_of(run_folder):
        assert line["parity/logprob_abs_diff_max"] <= 1e-4
        assert line["reshard/bytes_received"] == line["reshard/bytes_minimum"] > 0


def test_nothing_has_changed_before_the_first_update(run_folder):
    assert abs(metrics_of(run_folder)[0]["kl/mean"]) <= 1e-4


def test_a_person_sees_steps_samples_and_before_and_after(run_folder):
    text = (run_folder / "stdout.txt").read_text()
    assert "64 prompts x 2 responses = 128 samples per step" in text
    assert "step 2/2" in text and "sample " in text
    assert "weight sync: in place" in text
    assert "start check: greedy tokens of 16 of 16 prompts are the same after a sleep" in text
    assert "held-out prompts before and after" in text
    rows = (run_folder / "rollouts/step_000002.jsonl").read_text().splitlines()
    assert len(rows) == 128
    assert {"prompt", "response", "reward", "truncated"} <= json.loads(rows[0]).keys()
    assert list((run_folder / "tensorboard").iterdir())
    ledger = (run_folder / "ledger.jsonl").read_text().splitlines()
    phases = {json.loads(row).get("phase") for row in ledger}
    assert {"rollout", "reward", "log_prob", "update_actor", "reshard"} <= phases


def test_the_exported_model_answers_in_transformers(run_folder):
    model = AutoModelForCausalLM.from_pretrained(run_folder / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run_folder / "hf")
    ids = torch.tensor([tokenizer("nilok>").input_ids])
    answer = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert answer.shape[1] > ids.shape[1]
    with torch.no_grad():
        logits = model(ids).logits
    assert torch.isfinite(logits).all()
