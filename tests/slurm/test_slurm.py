"""slurm/ppo_cpu_smoke.sh under a real Slurm of three nodes on this machine, two of which it takes.

By default one run to the end. SLURM_TESTS=all also takes those that wait for time limits (whole
minutes) and for the two minutes that Slurm keeps a requeued job back; a test then takes up to eight
minutes: give pytest --timeout=900.
"""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, missing_for_slurm
from safetensors import safe_open

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm" / "ppo_cpu_smoke.sh"
NOT_COMPARED = ("time/", "memory/", "gpu/", "train/throughput", "train/mfu", "reshard/seconds")
ALL = os.environ.get("SLURM_TESTS") == "all"
STEPS = 40 if ALL else 4
LONGEST_SECONDS = 800.0

pytestmark = pytest.mark.skipif(bool(missing_for_slurm()), reason=missing_for_slurm())
full = pytest.mark.skipif(not ALL, reason="waits for minutes; SLURM_TESTS=all takes it")

# The quickstart's reward. The first start of a job that is to be interrupted is slow: it is in its
# middle for long enough.
REWARD = """\
import os
import time

DELAY = 2.0 if "SLOW" in os.environ and "SLURM_RESTART_COUNT" not in os.environ else 0.0


def score(*, prompt, response, answer, **fields):
    time.sleep(DELAY)
    return sum(a == b for a, b in zip(response, answer)) / max(len(response), len(answer))
"""


@dataclass
class Bench:
    """A cluster and what the runs on it share."""

    cluster: Cluster
    folder: Path
    check: str = "true"
    jobs: list[str] = field(default_factory=list)
    first_step_seconds: float = 0.0
    """From the submission to the end of the first step, on this machine as busy as it is."""

    def submit(self, run: Path, *options: str, slow: bool = False, interval_steps: int = 0) -> str:
        """The number of the job. `options`: of sbatch; slow: see REWARD."""
        words = [
            *("sbatch", "--parsable", f"--chdir={self.folder}", "--output=%j.out", *options),
            *(str(SCRIPT), f"run.output_dir={run}", f"run.steps={STEPS}"),
            *(f"reward.function={self.folder}/rewards.py:score", "warmup.steps=1"),
            *("rollout.prompts_per_step=4", "ppo.mini_batch_samples=4", "evaluation.prompts="),
            f"checkpoint.interval_steps={interval_steps}",
        ]
        job = self.cluster.run(
            *words,
            PYTHON=sys.executable,
            DATA=str(self.folder / "data"),
            NODE_CHECK=self.check,
            CUDA_VISIBLE_DEVICES="",
            **({"SLOW": "1"} if slow else {}),
        ).strip()
        self.jobs.append(job)
        return job

    def wait(self, job: str, *, seconds: float = LONGEST_SECONDS) -> dict[str, str]:
        """Until the job has ended for good."""
        ends = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        try:
            return self.cluster.wait_for_job(
                job, until=lambda found: found["JobState"] in ends, timeout_seconds=seconds
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said(job)}") from error

    def wait_for_steps(self, job: str, run: Path, *, steps: int) -> None:
        deadline = time.monotonic() + LONGEST_SECONDS
        while num_steps(run) < steps:
            assert time.monotonic() < deadline, self.said(job)
            time.sleep(0.2)

    def finish(self, run: Path, *options: str, slow: bool = False) -> dict[str, str]:
        """Submit, and see the job end well."""
        job = self.submit(run, *options, slow=slow)
        found = self.wait(job)
        assert found["JobState"] == "COMPLETED", self.said(job)
        return found

    def said(self, job: str) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else "(no output)"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "rewards.py").write_text(REWARD)
    with Cluster(folder / "cluster") as cluster:
        yield Bench(cluster, folder)


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Path:
    """A run that nothing interrupts."""
    run = bench.folder / "whole"
    began = time.monotonic()
    job = bench.submit(run)
    bench.wait_for_steps(job, run, steps=1)
    bench.first_step_seconds = time.monotonic() - began
    found = bench.wait(job)
    print(
        f"first step after {bench.first_step_seconds:.0f} s, {STEPS} steps to the end: "
        f"{time.monotonic() - began:.0f} s"
    )
    assert found["JobState"] == "COMPLETED", bench.said(job)
    assert found["Restarts"] == "0" and found["NodeList"] == "n[1-2]"
    return run


def num_steps(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def metrics(run: Path) -> list[dict[str, Any]]:
    """Each step's line, less what may differ between equal runs."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(NOT_COMPARED)}
        for line in lines
    ]


def weights(run: Path) -> dict[str, bytes]:
    with safe_open(run / "hf" / "model.safetensors", framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def assert_same_run(run: Path, *, expected: Path) -> None:
    """Bit by bit."""
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))
    assert metrics(run) == metrics(expected)
    assert weights(run) == weights(expected)


def starts(run: Path, job: str) -> list[dict[str, Any]]:
    """What the job's script has noted of its starts."""
    return [json.loads(line) for line in (run / "slurm" / f"job_{job}.jsonl").open()]


def test_two_tasks_on_each_of_two_nodes_run_to_the_end(bench: Bench, whole: Path) -> None:
    job = bench.jobs[0]
    said = bench.said(job)
    assert [line["step"] for line in metrics(whole)] == list(range(1, STEPS + 1))
    assert "start 1: 2 nodes (n1, n2) of 2 tasks; time limit: 20" in said
    assert "slurm_job] done" in said
    # What rank 0 prints is shown in the job's own output; each task has a file, each rank a log.
    tasks = sorted(path.name for path in (whole / "logs" / f"job_{job}.0").glob("task_*.txt"))
    assert tasks == [f"task_{rank:04d}.txt" for rank in range(4)]
    shown = (whole / "logs" / f"job_{job}.0" / "task_0000.txt").read_text()
    assert "samples per step" in shown and "samples per step" in said
    assert len(list((whole / "logs").glob("rank_*.log"))) == 4


@full
def test_a_limit_that_is_too_short_is_survived_without_a_hand(bench: Bench, whole: Path) -> None:
    run = bench.folder / "short"
    # The signal comes 60 to 90 s before it; in a slow start 40 steps take 160 s.
    minutes = math.ceil((1.3 * bench.first_step_seconds + 100) / 60)
    began = time.monotonic()
    found = bench.finish(run, f"--time={minutes}", "--signal=B:USR1@60", slow=True)
    job = found["JobId"]
    print(f"{found['Restarts']} restarts, {time.monotonic() - began:.0f} s\n{bench.said(job)}")
    assert int(found["Restarts"]) >= 1
    first = starts(run, job)[0]
    assert (first["exit_code"], first["requeue"]) == (3, True)
    assert first["checkpoint_before"] == "" and first["checkpoint_after"] >= "step_000001"
    assert "SIGUSR1" in bench.said(job) and "stopped by " in bench.said(job)
    assert_same_run(run, expected=whole)


@full
def test_a_cancelled_run_and_one_stopped_by_hand_go_on(bench: Bench, whole: Path) -> None:
    run = bench.folder / "cancelled"
    job = bench.submit(run, slow=True)
    bench.wait_for_steps(job, run, steps=3)
    bench.cluster.run("scancel", "--signal=TERM", job)  # to the tasks: save, then end
    found = bench.wait(job)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "3:0", "0")
    assert "stopped by hand, the state is saved" in bench.said(job)
    reached = num_steps(run)
    assert 3 <= reached < STEPS

    job = bench.submit(run, slow=True)
    bench.wait_for_steps(job, run, steps=reached + 3)
    bench.cluster.run("scancel", job)
    found = bench.wait(job)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")
    saved = (run / "checkpoints" / "latest").read_text()
    assert saved >= f"step_{reached + 3:06d}", "saved within KillWait"
    time.sleep(5)
    assert bench.cluster.job(job)["JobState"] == "CANCELLED"
    print(bench.said(job))
    bench.finish(run)
    assert_same_run(run, expected=whole)


@full
@pytest.mark.parametrize("victim", ["n1", "n2"])
def test_a_node_that_dies_is_survived_without_a_hand(
    bench: Bench, whole: Path, victim: str
) -> None:
    """n1 takes the batch script with it: Slurm itself puts the job back. With n2 the script may be
    the first to notice."""
    run = bench.folder / f"without_{victim}"
    job = bench.submit(run, slow=True, interval_steps=5)
    bench.wait_for_steps(job, run, steps=8)
    began = time.monotonic()
    bench.cluster.kill_node(victim)
    try:
        found = bench.wait(job)
        print(f"{victim} died: {found['Restarts']} restarts, {time.monotonic() - began:.0f} s")
        print(bench.said(job))
        assert found["JobState"] == "COMPLETED", bench.said(job)
        assert int(found["Restarts"]) >= 1 and victim not in found["NodeList"]
        assert_same_run(run, expected=whole)
    finally:
        bench.cluster.start_node(victim)
        bench.cluster.wait_for_idle_nodes()


@full
def test_a_node_that_does_not_pass_its_check_is_left_out(bench: Bench, whole: Path) -> None:
    run = bench.folder / "bad_node"
    bench.check = "sh -c '[ $SLURMD_NODENAME != n2 ]'"
    try:
        found = bench.finish(run)
    finally:
        bench.check = "true"
    print(bench.said(found["JobId"]))
    assert (found["Restarts"], found["ExcNodeList"]) == ("1", "n2")
    assert found["NodeList"] == "n[1,3]"
    assert starts(run, found["JobId"])[0]["bad_nodes"] == ["n2"]
    assert_same_run(run, expected=whole)


@full
def test_an_array_trains_a_seed_each(bench: Bench) -> None:
    """One after the other: there are nodes for one."""
    run = bench.folder / "array"
    job = bench.submit(run, "--array=1-2%1", "--output=%A.out", "--open-mode=append")
    deadline = time.monotonic() + LONGEST_SECONDS
    while bench.cluster.run("squeue", "--noheader", "--jobs", job).strip():
        assert time.monotonic() < deadline, bench.said(job)
        time.sleep(1)
    first, second = (metrics(run / f"seed_{seed}") for seed in (1, 2))
    assert len(first) == len(second) == STEPS
    assert first != second
    for seed in (1, 2):
        assert f"seed: {seed}\n" in (run / f"seed_{seed}" / "config.yaml").read_text()
