"""The benchmarks that are meant for a GPU run on this machine's CPU, with a tiny model."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ("--shape", "tiny")
FEW = ("--prompts", "2", "--responses-per-prompt", "2", "--steps", "1", "--updates", "2")

with_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here")


@pytest.fixture
def run(forker, tmp_path):
    """Run a benchmark on so many ranks; its figures."""

    def figures(name: str, *words: str, world_size: int = 1) -> dict:
        file = tmp_path / "figures.json"
        words = (*words, "--device", "cpu", "--json", str(file))
        forker.run_file(ROOT / "benchmarks" / name, *words, world_size=world_size, scratch=tmp_path)
        return json.loads(file.read_text())

    return figures


def test_train_step(run, tmp_path):
    trace = tmp_path / "trace.json"
    words = ["--micro-batches", "2", "--rounds", "1", "--profile", str(trace)]
    found = run("train_step.py", *TINY, *words)
    assert set(found["works"]) == {"log-prob pass", "actor update", "value pass", "critic update"}
    for work in found["works"].values():
        assert work["tokens"] == found["tokens"] <= 2 * 512
        assert 0 < work["mfu"] <= work["mfu_all_tokens"] < 1.5
    assert found["packing"]["num_micro_batches"] == 2
    assert found["packing"]["tokens_max"] <= 512
    assert found["packing"]["padding_share"] == 0
    assert found["profile"]["kinds"]["gemm"] > 0
    assert json.loads(trace.read_text())["traceEvents"]


def test_kernels(run):
    found = run("kernels.py", *TINY, "--calls", "1")
    assert {"qkv", "head", "norm", "norm, backward", "rotation", "logits: gradient"} <= set(found)
    assert all(value > 0 for values in found.values() for value in values)


@with_vllm
def test_rollout(run):
    words = ["--prompts", "2", "--responses-per-prompt", "2", "--rounds", "1"]
    found = run("rollout.py", *TINY, *words)
    assert len(found["seconds"]["engine"]) == len(found["seconds"]["bare vLLM"]) == 1
    seconds = {way: values[0] for way, values in found["seconds"].items()}
    assert found["ratio"] == pytest.approx(seconds["bare vLLM"] / seconds["engine"])
    assert found["response_tokens"] >= 4


@with_vllm
def test_reshard_gpu(run):
    found = run("reshard_gpu.py", *TINY, "--rounds", "2")
    # 2 layers of qkv, output, gate and up, down; the tied embedding; norms. Float32.
    layer = 128 * (128 + 2 * 64) + 128 * 128 + 3 * 128 * 256 + 2 * 128
    assert found["bytes"] == 4 * (2 * layer + 512 * 128 + 128)
    assert all(len(values) == 2 for values in found["seconds"].values())
    assert found["ratios"]["sync_to_copy"] > 0


@with_vllm
def test_vllm_beside(tmp_path):
    """In a process of its own, since what the import of vLLM changes is measured."""
    file = tmp_path / "figures.json"
    words = [*TINY, "--rounds", "1", "--micro-batches", "1", "--device", "cpu", "--json", str(file)]
    command = [sys.executable, "benchmarks/vllm_beside.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert {sample["stage"] for sample in found["samples"]} == {
        "before", "imported", "awake", "asleep",
    }  # fmt: skip
    assert all(ratio > 0 for ratio in found["ratios"].values())
    assert any("VLLM_LOGGING_LEVEL" in line for line in found["changes"])


@with_vllm
def test_ppo_step(run):
    found = run("ppo_step.py", *TINY, *FEW)
    phases = {p: s[0] for p, s in found["steps"].items() if p != "step"}
    assert 0 < sum(phases.values()) <= found["step_seconds"] * 1.001
    assert found["parts_seconds"] == pytest.approx(sum(s[0] for s in found["alone"].values()))
    assert found["last_metrics"]["step"] == 2
    assert found["last_metrics"]["ppo/optimizer_steps"] == 2
    assert found["last_metrics"]["parity/logprob_abs_diff_mean"] < 1e-4


@with_vllm
def test_ppo_step_on_two_ranks(run):
    words = ["--layout", "pp2", "--engines", "2xtp1"]
    found = run("ppo_step.py", *TINY, *FEW, *words, world_size=2)
    assert set(found["steps"]) >= {"rollout", "update_critic", "update_actor", "reshard", "step"}
    assert found["last_metrics"]["reshard/bytes_received"] > 0
    assert found["last_metrics"]["parity/logprob_abs_diff_mean"] < 1e-4


def test_two_gpus(run):
    words = ["--shapes", "tiny", "--micro-batches", "3", "--rounds", "1"]
    found = run("two_gpus.py", *words, world_size=2)["tiny"]
    assert found["problems"] == {key: [] for key in ("one", "one, half", "tp2", "pp2", "dp2")}
    norms = [f["metrics"]["grad_norm/actor"] for f in found["layouts"].values()]
    assert norms == pytest.approx([norms[0]] * 5, rel=1e-4) and norms[0] > 0
    assert all(
        set(f["seconds"]) == {"actor pass", "actor update", "critic pass", "critic update"}
        for f in found["layouts"].values()
    )


def test_reshard_link(run):
    words = ["--shapes", "tiny", "--rounds", "1", "--settings", "1:0.5", "0.02:0.001"]
    found = run("reshard_link.py", *words, world_size=2)
    assert set(found["link"]) == {"all_to_all", "all_gather", "messages"}
    assert [pair["pair_ratio"] for pair in found["pairs"]] == [2.0, 1.0, 1.0]
    for pair in found["pairs"]:
        assert pair["1:0.5_bytes"] == pair["0.02:0.001_bytes"] == pair["minimum"] > 0
        assert pair["gather_bytes"] >= pair["minimum"]
