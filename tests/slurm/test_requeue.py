"""A real Slurm around tasks that only pretend to train: what reaches whom, and what comes back.

Limits and the wait after a requeue are shortened by hand here; test_slurm.py waits for them.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, missing_for_slurm

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm" / "ppo_cpu_smoke.sh"
LONGEST_SECONDS = 90.0

full = pytest.mark.skipif(
    os.environ.get("SLURM_TESTS") != "all", reason="waits for Slurm; SLURM_TESTS=all takes it"
)
pytestmark = pytest.mark.skipif(bool(missing_for_slurm()), reason=missing_for_slurm())

# In place of the tasks' python. Each task counts to 16, a step in half a second, and saves after
# each fourth one; a signal makes it save and end with exit code 3, as the trainer does. The next
# start goes on.
TASK = """\
#!/usr/bin/env python3
import os, pathlib, signal, sys, time

if "launch/train.py" not in sys.argv:
    sys.exit(os.environ["SLURMD_NODENAME"] == os.environ.get("BAD_NODE") and "checks" in sys.argv)
rank = os.environ["SLURM_PROCID"]
settings = dict(word.split("=", 1) for word in sys.argv if "=" in word)
run = pathlib.Path(settings["run.output_dir"])
latest = run / "checkpoints" / "latest"
asked = []
deaf = bool(os.environ.get("DEAF")) and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: deaf or asked.append(signal.Signals(number).name))
step = int(latest.read_text()) if latest.exists() else 0
print(f"rank {rank} on {os.environ['SLURMD_NODENAME']} begins after step {step}", flush=True)
if os.environ.get("FAILING"):
    sys.exit(int(os.environ["FAILING"]) if rank == "1" else 1)


def save():
    if rank == "0":
        latest.parent.mkdir(exist_ok=True)
        latest.write_text(str(step))


while step < int(os.environ.get("STEPS", "16")) and not asked:
    time.sleep(0.5)
    step += 1
    with open(run / f"steps_{rank}.txt", "a") as file:
        file.write(f"{step}\\n")
    if step % 4 == 0:
        save()
print(f"rank {rank} ends after step {step}, {asked}", flush=True)
save()
sys.exit(3 if asked else 0)
"""


class Jobs:
    """Submits the script with pretended tasks, each job with a run of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.task = folder / "task"
        self.task.write_text(TASK)
        self.task.chmod(0o755)

    def submit(self, run: Path, *options: str, **environment: str) -> str:
        words = ["sbatch", "--parsable", f"--chdir={self.folder}", "--output=%j.out", *options]
        environment |= {"PYTHON": str(self.task), "DATA": str(self.folder)}
        environment.setdefault("NODE_CHECK", "{python} checks")
        return self.cluster.run(*words, str(SCRIPT), f"run.output_dir={run}", **environment).strip()

    def wait(
        self,
        job: str,
        *,
        until: Callable[[dict[str, str]], bool],
        timeout_seconds: float = LONGEST_SECONDS,
    ) -> dict[str, str]:
        try:
            return self.cluster.wait_for_job(job, until=until, timeout_seconds=timeout_seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said(job)}{self.cluster.text()}") from error

    def wait_for_steps(self, run: Path, *, steps: int) -> None:
        """Of all tasks."""
        deadline = time.monotonic() + LONGEST_SECONDS
        while min(len(steps_of(run, rank=rank)) for rank in range(4)) < steps:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def start_again_now(self, job: str) -> None:
        """Shorten Slurm's wait after a requeue."""
        self.wait(
            job, until=lambda found: (found["JobState"], found["Restarts"]) == ("PENDING", "1")
        )
        time.sleep(3)  # within the second of the requeue, slurmd takes the start for the last one
        self.cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def said(self, job: str) -> str:
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""


def is_over(found: dict[str, str]) -> bool:
    return found["JobState"] in {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


def steps_of(run: Path, *, rank: int = 0) -> list[int]:
    path = run / f"steps_{rank}.txt"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def starts(run: Path, job: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "slurm" / f"job_{job}.jsonl").open()]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    folder = tmp_path_factory.mktemp("requeue")
    with Cluster(folder / "cluster") as cluster:
        yield Jobs(cluster, folder)


def test_the_signal_reaches_all_tasks_once_and_the_job_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.submit(tmp_path)
    jobs.wait_for_steps(tmp_path, steps=2)
    jobs.cluster.run("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@60 does
    jobs.start_again_now(job)
    found = jobs.wait(job, until=is_over)
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), jobs.said(job)
    for rank in range(4):
        logs = [tmp_path / "logs" / f"job_{job}.{n}" / f"task_{rank:04d}.txt" for n in (0, 1)]
        assert logs[0].read_text().count("SIGUSR1") == 1
        assert f"rank {rank} on n{1 + rank // 2} " in logs[0].read_text()
    first, second = starts(tmp_path, job)
    assert (first["exit_code"], first["requeue"], second["exit_code"]) == (3, True, 0)
    assert second["checkpoint_before"] == first["checkpoint_after"] != ""
    assert steps_of(tmp_path) == list(range(1, 17))
    said = jobs.said(job)  # of both starts, in one file
    assert "start 1: " in said and "start 2: " in said and "slurm_job] done" in said


def test_stopped_by_hand_it_stays_out_of_the_queue(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.submit(tmp_path)
    jobs.wait_for_steps(tmp_path, steps=2)
    jobs.cluster.run("scancel", "--signal=TERM", job)
    found = jobs.wait(job, until=is_over)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("FAILED", "3:0", "0")
    assert "stopped by hand, the state is saved" in jobs.said(job)


def test_cancelled_it_saves_and_stays_out_of_the_queue(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.submit(tmp_path)
    jobs.wait_for_steps(tmp_path, steps=2)
    jobs.cluster.run("scancel", job)
    found = jobs.wait(job, until=is_over)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")
    saved = (tmp_path / "checkpoints" / "latest").read_text()
    assert int(saved) == steps_of(tmp_path)[-1] < 16
    log = (tmp_path / "logs" / f"job_{job}.0" / "task_0003.txt").read_text()
    assert "SIGTERM" in log


@pytest.mark.parametrize(("code", "requeued"), [("2", False), ("9", True)])
def test_a_failure_comes_back_with_its_exit_code(
    jobs: Jobs, tmp_path: Path, code: str, requeued: bool
) -> None:
    """srun's is the largest of the tasks'; the others end with 1."""
    job = jobs.submit(tmp_path, FAILING=code, MAX_ATTEMPTS="2")
    if requeued:
        jobs.start_again_now(job)
    found = jobs.wait(job, until=is_over)
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", f"{code}:0"), jobs.said(job)
    assert found["Restarts"] == ("1" if requeued else "0")
    assert ("start 2 in a row without a new checkpoint" in jobs.said(job)) is requeued


def test_a_node_that_is_not_fit_is_left_out(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.submit(tmp_path, BAD_NODE="n2")
    jobs.start_again_now(job)
    found = jobs.wait(job, until=is_over)
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), jobs.said(job)
    assert (found["ExcNodeList"], found["NodeList"]) == ("n2", "n[1,3]")
    assert (tmp_path / "slurm" / "bad_nodes.txt").read_text().startswith("n2 ")
    log = tmp_path / "logs" / f"job_{job}.1" / "task_0003.txt"
    assert "rank 3 on n3 begins after step 0" in log.read_text()


@full
def test_an_element_of_an_array_is_put_back_alone(jobs: Jobs, tmp_path: Path) -> None:
    """The last element has the array's own number."""
    array = jobs.submit(tmp_path, "--array=4-5%1", "--output=%A_%a.out")
    jobs.wait_for_steps(tmp_path / "seed_4", steps=16)
    jobs.wait_for_steps(tmp_path / "seed_5", steps=2)
    jobs.cluster.run("scancel", "--batch", "--signal=USR1", f"{array}_5")
    jobs.start_again_now(f"{array}_5")
    found = jobs.wait(f"{array}_5", until=is_over)
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1")
    assert jobs.cluster.job(f"{array}_4")["Restarts"] == "0"
    assert steps_of(tmp_path / "seed_4") == steps_of(tmp_path / "seed_5") == list(range(1, 17))


@full
def test_a_node_that_dies_takes_the_batch_script_with_it(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.submit(tmp_path)
    jobs.wait_for_steps(tmp_path, steps=2)
    jobs.cluster.kill_node("n1")
    try:
        jobs.start_again_now(job)
        found = jobs.wait(job, until=is_over)
        assert found["JobState"] == "COMPLETED", jobs.said(job)
        assert (found["Restarts"], found["NodeList"]) == ("1", "n[2-3]")
    finally:
        jobs.cluster.start_node("n1")
        jobs.cluster.wait_for_idle_nodes()


@full
def test_a_time_limit_is_survived_without_a_hand(jobs: Jobs, tmp_path: Path) -> None:
    job = jobs.submit(tmp_path, "--time=2", "--signal=B:USR1@30", STEPS="220")
    found = jobs.wait(job, until=is_over, timeout_seconds=800)
    assert found["JobState"] == "COMPLETED" and int(found["Restarts"]) >= 1, jobs.said(job)
    assert {start["exit_code"] for start in starts(tmp_path, job)[:-1]} == {3}
    assert steps_of(tmp_path) == list(range(1, 221))


@full
def test_a_limit_that_comes_before_the_state_is_saved(jobs: Jobs, tmp_path: Path) -> None:
    """The tasks of the first start do not hear the signals: they are killed at the limit."""
    job = jobs.submit(tmp_path, "--time=1", "--signal=B:USR1@10", STEPS="300", DEAF="1")
    jobs.wait(job, until=lambda found: found["Restarts"] == "1", timeout_seconds=200)
    first = starts(tmp_path, job)[0]
    assert (first["exit_code"], first["requeue"]) == (137, True)
    assert "the time limit came before the state was saved" in jobs.said(job)
    assert int(first["checkpoint_after"]) >= 20
    jobs.cluster.run("scancel", job)
