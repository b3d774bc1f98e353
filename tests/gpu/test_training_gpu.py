"""The quickstart's task on a GPU: vLLM beside Megatron-Core, one rank and four on one device."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_megatron.errors import EXIT_STOPPED_RESUMABLE
from rlhf_megatron.launcher import launch

ROOT = Path(__file__).parents[2]
GPU_OVERRIDES = [
    "distributed.device=cuda",
    "run.steps=4",
    "warmup.steps=60",
    "evaluation.interval_steps=4",
    "actor.precision=bf16",
    "critic.precision=bf16",
    "ref.precision=bf16",
    "rollout.enforce_eager=true",
    "rollout.kv_cache_memory_gb=0.5",
    "rollout.gpu_memory_utilization=0.2",
]
ONE_RANK = [
    f"{role}.parallel.{key}"
    for role in ("actor", "critic", "ref")
    for key in (
        "tensor_model_parallel_size=1",
        "pipeline_model_parallel_size=1",
        "sequence_parallel=false",
    )
]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart") / "data"
    subprocess.run(
        [sys.executable, "tools/make_quickstart.py", "--output", str(folder)], cwd=ROOT, check=True
    )
    return folder


def command(folder, output, overrides):
    return [
        sys.executable,
        str(ROOT / "tests/gpu/one_gpu_rank.py"),
        "--config",
        str(ROOT / "configs/quickstart_cpu.yaml"),
        f"run.output_dir={output}",
        f"data.prompts={folder}/train.jsonl",
        f"evaluation.prompts={folder}/heldout.jsonl",
        f"warmup.demonstrations={folder}/demonstrations.jsonl",
        f"actor.model={folder}/model",
        f"reward.function={ROOT}/configs/rewards/quickstart.py:reward",
        *GPU_OVERRIDES,
        *overrides,
    ]


def run(folder, output, overrides, *, num_processes):
    assert launch(command(folder, output, overrides), num_processes=num_processes) == 0
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_one_rank_trains_with_parity(quickstart, tmp_path, engine):
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed here")
    overrides = [*ONE_RANK, f"rollout.engine={engine}", "rollout.tensor_parallel_size=1"]
    metrics = run(quickstart, tmp_path / "run", overrides, num_processes=1)
    assert len(metrics) == 4
    for step in metrics:
        assert step["parity/logprob_abs_diff_mean"] <= 0.05
        assert step["grad_norm/actor"] > 0 and step["grad_norm/critic"] > 0
    assert (tmp_path / "run/hf/model.safetensors").exists()


def test_a_quantised_engine_takes_weights_through_its_own_reload(quickstart, tmp_path, capfd):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    pytest.importorskip("compressed_tensors", reason="vLLM's fp8 needs compressed-tensors")
    overrides = [
        *ONE_RANK,
        "rollout.engine=vllm",
        "rollout.tensor_parallel_size=1",
        "rollout.engine_args={quantization: fp8}",
        "parity.logprob_abs_diff_mean=0.3",
        "ppo.importance_sampling.cap=2",
    ]
    metrics = run(quickstart, tmp_path / "run", overrides, num_processes=1)
    output = capfd.readouterr().out
    assert "through the engine's own reload" in output
    assert "start check" in output
    for step in metrics:
        assert 0 < step["parity/logprob_abs_diff_mean"] <= 0.3
        assert step["off_policy/is_weight_mean"] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize(
    "options",
    [["rollout.sleep_level=2"], ["reshard.interval=2"], ["rollout.weight_update=reload"]],
    ids=["sleep_level_2", "interval_2", "reload"],
)
def test_ways_to_keep_and_renew_the_engines_weights(quickstart, tmp_path, capfd, options):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    overrides = [*ONE_RANK, "rollout.engine=vllm", "rollout.tensor_parallel_size=1", *options]
    metrics = run(quickstart, tmp_path / "run", overrides, num_processes=1)
    assert "start check: greedy tokens of 8 of 8 prompts" in capfd.readouterr().out
    for step in metrics:
        if step["off_policy/weight_version_lag_max"] == 0:
            assert step["parity/logprob_abs_diff_mean"] <= 0.05


def test_a_run_with_cuda_graphs_stops_where_it_is_asked_to(quickstart, tmp_path):
    """Compilers and graphs may take signals over: SIGTERM must still save and end with 3."""
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    overrides = [*ONE_RANK, "rollout.engine=vllm", "rollout.tensor_parallel_size=1"]
    overrides += ["rollout.enforce_eager=false", "warmup.steps=0", "run.steps=100000"]
    metrics = tmp_path / "run/metrics.jsonl"
    with subprocess.Popen(command(quickstart, tmp_path / "run", overrides)) as process:
        deadline = time.monotonic() + 300
        while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(timeout=120) == EXIT_STOPPED_RESUMABLE
        finally:
            process.kill()
    assert (tmp_path / "run/checkpoints/latest").exists()


def test_four_ranks_share_one_gpu_at_tp2_pp2(quickstart, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    overrides = [
        "warmup.steps=10",
        "run.steps=2",
        "rollout.engine_args={disable_custom_all_reduce: true}",
        "rollout.gpu_memory_utilization=0.1",
    ]
    metrics = run(quickstart, tmp_path / "run", overrides, num_processes=4)
    for step in metrics:
        assert step["parity/logprob_abs_diff_mean"] <= 0.05
        assert step["reshard/bytes_received"] == step["reshard/bytes_minimum"] > 0
