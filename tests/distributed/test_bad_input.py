"""Bad input end to end: two ranks of the real program, one message, exit code 2, no traceback.

The cases fork the ranks; one goes through the console command and its launcher.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pool import run_program
from tiny_tokenizer import save_tiny_model

ROOT = Path(__file__).parents[2]
LONGEST_SECONDS = 120
"""A hang would show as this limit; a run takes some ten seconds, most of them imports."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad_input")
    save_tiny_model(folder / "model")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"t{i} t{i + 1}"}) + "\n" for i in range(8))
    )
    (folder / "empty.jsonl").write_text("")
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "t1 " * 40}) + "\n")
    (folder / "rewards.py").write_text(
        "def fine(prompt, response, **fields):\n"
        "    return 1.0\n\n\n"
        "def raises(prompt, response, **fields):\n"
        "    raise KeyError('no such answer')\n\n\n"
        "def nan(prompt, response, **fields):\n"
        "    return float('nan')\n"
    )
    return folder


def words_of(files, output, overrides) -> list[str]:
    """The command line of one step."""
    settings = {
        "run.output_dir": output,
        "run.steps": 1,
        "actor.model": files / "model",
        "actor.precision": "fp32",
        "critic.precision": "fp32",
        "ref.precision": "fp32",
        "data.prompts": files / "prompts.jsonl",
        "reward.function": f"{files}/rewards.py:fine",
        "rollout.engine": "hf",
        "rollout.prompts_per_step": 4,
        "rollout.max_prompt_tokens": 16,
        "rollout.max_response_tokens": 4,
        "ppo.mini_batch_samples": 4,
        "export.final": "false",
    } | overrides
    config = files / "config.yaml"
    config.write_text("run:\n  name: bad input\n")
    return ["--config", str(config), *(f"{key}={value}" for key, value in settings.items())]


def run_command(words):
    """As a user starts it on one node: the exit code, and what was said on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_megatron.cli", "train", "--nproc-per-node", "2", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    return done.returncode, done.stderr


def run_forked(words, folder):
    """The same of forked ranks, which must end alike."""
    ends = run_program(words, world_size=2, folder=folder)
    said = "".join(end.stderr for end in ends)
    (code,) = {end.exit_code for end in ends}
    return code, said


CASES = {
    "unknown key": (
        {"rollout.temprature": 1},
        ["rollout.temprature", "did you mean rollout.temperature"],
    ),
    "tensor parallel size does not divide": (
        {"actor.parallel.tensor_model_parallel_size": 2, "actor.model": "KV3"},
        ["actor.parallel.tensor_model_parallel_size=2", "3"],
    ),
    "world size does not match": (
        {"actor.parallel.tensor_model_parallel_size": 4},
        ["actor.parallel", "2"],
    ),
    "no model directory": ({"actor.model": "/nowhere/model"}, ["actor.model=/nowhere/model"]),
    "no prompts in the file": ({"data.prompts": "EMPTY"}, ["data.prompts=", "empty"]),
    "prompt longer than allowed": (
        {"data.prompts": "LONG", "rollout.prompts_per_step": 1, "ppo.mini_batch_samples": 1},
        ["40 tokens", "rollout.max_prompt_tokens=16"],
    ),
    "prompt and response longer than the context": (
        {"rollout.max_prompt_tokens": 60, "rollout.max_response_tokens": 60},
        ["rollout.max_response_tokens", "64"],
    ),
    "no reward file": (
        {"reward.function": "/nowhere/rewards.py:f"},
        ["reward.function=/nowhere/rewards.py:f"],
    ),
    "no such reward function": (
        {"reward.function": "REWARDS:missing"},
        ["missing", "fine, nan, raises"],
    ),
    "reward raises": (
        {"reward.function": "REWARDS:raises"},
        ["prompt ", "sample 0", "KeyError", "no such answer"],
    ),
    "reward is NaN": ({"reward.function": "REWARDS:nan"}, ["prompt ", "sample 0", "nan"]),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_message_and_exit_code_2(files, tmp_path, name):
    overrides, phrases = CASES[name]
    places = {
        "EMPTY": str(files / "empty.jsonl"),
        "LONG": str(files / "long.jsonl"),
        "REWARDS": str(files / "rewards.py"),
        "KV3": str(files / "three_heads"),
    }
    if overrides.get("actor.model") == "KV3":
        save_tiny_model(files / "three_heads", num_attention_heads=3, num_key_value_heads=3)
    for word, place in places.items():
        overrides = {k: str(v).replace(word, place) for k, v in overrides.items()}
    words = words_of(files, tmp_path / "run", overrides)
    code, said = run_command(words) if name == "unknown key" else run_forked(words, tmp_path)
    assert code == 2, said
    assert "Traceback" not in said
    assert said.count("error: ") == 1, said
    message = said[said.index("error: ") :]
    for phrase in phrases:
        assert phrase in message, message


def test_a_fault_of_the_program_ends_all_ranks_with_that_rank_and_its_traceback(files, tmp_path):
    (files / "rewards_exit.py").write_text(
        "import torch.distributed as dist\n\n\n"
        "class Stop(BaseException):\n    pass\n\n\n"
        "def reward(prompt, response, **fields):\n"
        "    if dist.get_rank() == 1:\n        raise Stop('rank one had enough')\n"
        "    return 1.0\n"
    )
    function = {"reward.function": f"{files}/rewards_exit.py:reward"}
    code, said = run_forked(words_of(files, tmp_path / "run", function), tmp_path)
    assert code == 1, said
    assert "error: rank 1 failed in reward of step 1: Stop: rank one had enough" in said
    assert said.count("Traceback (most recent call last)") == 1


def test_rewards_that_fail_can_be_dropped_and_counted(files, tmp_path):
    (files / "rewards_some.py").write_text(
        "def reward(prompt, response, **fields):\n"
        "    return float('nan') if prompt.startswith('t1 ') else 1.0\n"
    )
    overrides = {
        "reward.function": f"{files}/rewards_some.py:reward",
        "reward.on_error": "drop",
        "rollout.prompts_per_step": 8,
        "ppo.mini_batch_samples": 8,
    }
    code, said = run_forked(words_of(files, tmp_path / "run", overrides), tmp_path)
    assert code == 0, said
    (line,) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["reward/dropped"] == 1
    assert metrics["reward/mean"] == 1.0
    torch.testing.assert_close(metrics["parity/logprob_abs_diff_max"], 0.0, atol=1e-4, rtol=0)
