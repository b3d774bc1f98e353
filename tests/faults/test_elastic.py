"""torchrun --max-restarts brings a run back by itself where a rank was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from tiny_run import assert_same_run, run_to_the_end, settings

ROOT = Path(__file__).parents[2]
LONGEST_SECONDS = 250.0


def two_ranks(files, output):
    return settings(
        files,
        output=output,
        actor__parallel__pipeline_model_parallel_size=1,
        critic__parallel__pipeline_model_parallel_size=1,
        ref__parallel__pipeline_model_parallel_size=1,
        run__steps=3,
    )


def rank_process(launcher: int, *, rank: int) -> psutil.Process:
    """The process of a rank under torchrun."""
    for process in psutil.Process(launcher).children():
        if process.environ().get("RANK") == str(rank):
            return process
    raise AssertionError("no such rank")


def wait_for_steps(run: Path, *, steps: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + LONGEST_SECONDS
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < steps:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_rank_is_survived_without_a_hand(files, tmp_path):
    run_to_the_end(two_ranks(files, tmp_path / "whole"), logs=tmp_path / "logs", world_size=2)
    run = tmp_path / "run"
    with (tmp_path / "torchrun.txt").open("w") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", "2", "--max-restarts", "3", "launch/train.py"),
                *two_ranks(files, run),
            ],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for_steps(run, steps=2, process=process)
        os.kill(rank_process(process.pid, rank=1).pid, signal.SIGKILL)
        code = process.wait(LONGEST_SECONDS)
    finally:
        process.kill()
    said = (tmp_path / "torchrun.txt").read_text()
    assert code == 0, said
    assert "rank 1 died" in said and "resuming from" in said
    assert_same_run(run, expected=tmp_path / "whole")
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    assert steps == sorted(set(steps))
