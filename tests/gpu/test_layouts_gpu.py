"""The quickstart's task at TP2, PP2 and DP2 over NCCL, with one vLLM engine of TP2 and with two of
TP1, beside one rank alone.

Sampling is seeded, but engines of other shapes round otherwise, and a token in some hundred is
another one: hence many samples, so that losses and norms hardly move. All start from one model that
has been warmed up. The same batch through all layouts is what benchmarks/two_gpus.py compares.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from test_training_gpu import ONE_RANK, command, quickstart

__all__ = ["quickstart"]
AT_ONCE = 7
LIMIT_SECONDS = 300
LAYOUTS = {
    "tp2": ("tensor_model_parallel_size=2", "sequence_parallel=true"),
    "pp2": ("pipeline_model_parallel_size=2",),
    "dp2": (),
}
ENGINES = {"engine_tp2": 2, "engines_2xtp1": 1}
COMMON = [
    "rollout.engine=vllm",
    "rollout.sleep_level=0",  # vLLM's check of what a sleep frees counts other jobs' memory too
    "rollout.engine_args={disable_custom_all_reduce: true}",
    "rollout.gpu_memory_utilization=0.1",
    "rollout.prompts_per_step=128",
    "rollout.responses_per_prompt=8",
    "rollout.max_num_seqs=256",
    "ppo.epochs=1",
    "ppo.mini_batch_samples=1024",
    "actor.optimizer.learning_rate=0",
    "critic.optimizer.learning_rate=0",
    "run.steps=2",
]
EQUAL = (
    "reward/mean",
    "response/length_mean",
    "ppo/entropy",
    "critic/value_loss",
    "grad_norm/actor",
    "grad_norm/critic",
)
TOLERANCE = 0.03
PARITY = 0.05


@dataclass(frozen=True)
class Way:
    """How a run is laid out."""

    name: str
    num_ranks: int
    overrides: list[str]


ONE = Way("one", 1, ["rollout.tensor_parallel_size=1"])
WARM = Way("warm", 1, ["rollout.tensor_parallel_size=1", "run.steps=1"])
WAYS = [
    Way(
        f"{layout}-{engine}",
        2,
        [f"{role}.parallel.{key}" for role in ("actor", "critic", "ref") for key in keys]
        + [f"rollout.tensor_parallel_size={size}"],
    )
    for layout, keys in LAYOUTS.items()
    for engine, size in ENGINES.items()
]


@pytest.fixture(scope="module")
def runs(quickstart, tmp_path_factory):
    """Name of the way -> metrics of its steps."""
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    folder = tmp_path_factory.mktemp("layouts")

    def run(way, *more):
        words = [*ONE_RANK, *COMMON, *way.overrides, *more]
        program = command(quickstart, folder / way.name, words)[1:]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        done = subprocess.run(
            [*launcher, f"--nproc-per-node={way.num_ranks}", *program],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=LIMIT_SECONDS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{way.name}: {done.stdout[-5000:]}"
        lines = (folder / way.name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    run(WARM)
    start = [f"actor.model={folder}/{WARM.name}/hf", "warmup.steps=0"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {way.name: pool.submit(run, way, *start) for way in (ONE, *WAYS)}
    return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])
def test_a_layout_gives_the_numbers_of_one_rank(runs, way):
    for own, one in zip(runs[way.name], runs["one"], strict=True):
        for name in EQUAL:
            print(f"{way.name} step {own['step']} {name} {own[name]:.5g}, one rank {one[name]:.5g}")
            assert own[name] == pytest.approx(one[name], rel=TOLERANCE, abs=1e-3), name
        print(f"parity {own['parity/logprob_abs_diff_mean']:.2g}")
        assert own["parity/logprob_abs_diff_mean"] <= PARITY
        assert own["reshard/bytes_received"] == own["reshard/bytes_minimum"]
