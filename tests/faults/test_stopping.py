"""Runs that are asked to stop: exit code 3, and the resumed run is the one that never stopped.

By default a few phases and the hf engine; FAULTS=all takes every phase, FAULTS_ENGINE=vllm vLLM.
"""

import os
import signal
import time

import pytest
from tiny_run import STEPS, Job, Trigger, assert_same_run, metrics, run_to_the_end, settings

ALL = [
    ("evaluation_rollout", 0),
    ("rollout", 1),
    ("reward", 1),
    ("sleep", 2),
    ("log_prob", 2),
    ("ref_log_prob", 2),
    ("value", 3),
    ("advantage", 3),
    ("update_critic", 3),
    ("evaluation_reward", 4),
    ("update_actor", 5),
]
FEW = [("evaluation_rollout", 0), ("log_prob", 2), ("update_actor", 4)]
WHOLE_STEPS = {"evaluation_reward", "update_critic", "update_actor", "reshard"}
"""Phases after whose beginning a step is finished."""
SECONDS_TO_STOP = 30.0


def stop_and_resume(files, tmp_path, phases, number):
    """Stop one run in each of the phases, one start after the other, and let it end at last."""
    words = settings(files, output=tmp_path / "run", checkpoint__interval_steps=0)
    for index, (phase, step) in enumerate(phases):
        trigger = Trigger(phase=phase, step=step, rank=index % 4, signals=(number,))
        job = Job(words, logs=tmp_path / f"stopped_{index}", trigger=trigger)
        codes = job.wait()
        assert codes == [3] * 4, f"{phase}: {codes}\n{job.text()}"
        assert job.text().count("stopped by ") == 1
        done = step if phase in WHOLE_STEPS or step == 0 else step - 1
        marker = tmp_path / "run" / "checkpoints" / "latest"
        assert marker.read_text() == f"step_{done:06d}\n", phase
    run_to_the_end(words, logs=tmp_path / "end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_stopped_in_its_phases_ends_as_if_it_had_not_been(files, whole, tmp_path, number):
    phases = ALL if os.environ.get("FAULTS") == "all" else FEW
    if number == signal.SIGUSR1:
        phases = [("reshard", 2)]
    stop_and_resume(files, tmp_path, phases, number)
    assert_same_run(tmp_path / "run", expected=whole)


def test_a_second_signal_ends_at_once_and_the_last_checkpoint_stays(files, whole, tmp_path):
    words = settings(files, output=tmp_path / "run", checkpoint__asynchronous="false")
    trigger = Trigger(phase="update_actor", step=3, signals=(signal.SIGTERM, signal.SIGTERM))
    job = Job(words, logs=tmp_path / "logs", trigger=trigger)
    codes = job.wait()
    assert codes == [1] * 4, job.text()
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_000002\n"
    run_to_the_end(words, logs=tmp_path / "end")
    assert_same_run(tmp_path / "run", expected=whole)


def test_before_the_time_limit_of_slurm_a_run_stops(files, tmp_path):
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(time.time()) + 3600)}
    words = settings(files, output=tmp_path / "run", checkpoint__stop_before_minutes=59.9)
    job = Job(words, logs=tmp_path / "logs", environment=slurm)
    assert job.wait() == [3] * 4, job.text()
    assert "stopped by the job's time limit, 59." in job.text()
    enough = settings(files, output=tmp_path / "run", checkpoint__stop_before_minutes=5)
    run_to_the_end(enough, logs=tmp_path / "end", environment=slurm)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
