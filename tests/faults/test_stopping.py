"""A run that is asked to stop, in each way: exit code 3, and resumed it is the one that never was.

By default in a few phases and with the hf engine; FAULTS=all takes every phase, FAULTS_ENGINE=vllm
vLLM.
"""

import os
import signal
import time

from tiny_run import Job, Trigger, assert_same_run, run_to_the_end, settings

TERM, USR1 = (signal.SIGTERM,), (signal.SIGUSR1,)
ALL = [
    ("evaluation_rollout", 0, TERM),
    ("reshard", 1, USR1),
    ("rollout", 3, TERM),
    ("reward", 3, TERM),
    ("sleep", 3, TERM),
    ("log_prob", 3, TERM),
    ("ref_log_prob", 3, TERM),
    ("value", 3, TERM),
    ("advantage", 3, TERM),
    ("update_critic", 3, TERM),
    ("evaluation_reward", 4, TERM),
    ("update_actor", 5, TERM),
]
"""In the order in which one run comes to them; in step 3 it has left at once before (see below)."""
FEW = [ALL[0], ALL[1], ("log_prob", 3, TERM), ("update_actor", 4, TERM)]
STOPS = ALL if os.environ.get("FAULTS") == "all" else FEW
WHOLE_STEPS = {"evaluation_reward", "update_critic", "update_actor", "reshard"}
"""Phases after whose beginning a step is finished."""
SLURM = {"SLURM_JOB_ID": "7"}


def test_a_run_stopped_in_all_ways_ends_as_if_it_had_not_been(files, whole, tmp_path):
    """Start after start of one run, each stopped elsewhere."""
    run = tmp_path / "run"

    def words(**changes):
        return settings(files, output=run, **({"checkpoint__interval_steps": 0} | changes))

    for index, (phase, step, signals) in enumerate(STOPS):
        trigger = Trigger(phase=phase, step=step, rank=index % 4, signals=signals)
        job = Job(words(), logs=tmp_path / f"stopped_{index}", trigger=trigger)
        codes = job.wait()
        assert codes == [3] * 4, f"{phase}: {codes}\n{job.text()}"
        assert job.text().count("stopped by ") == 1, job.text()
        done = step if phase in WHOLE_STEPS or step == 0 else step - 1
        assert latest(run) == done, phase
        if phase == "log_prob":
            is_stopped_before_the_time_limit_of_slurm(words, logs=tmp_path / "slurm")
            assert latest(run) == done
        if phase == "reshard":
            leaves_at_once_on_a_second_signal(words, logs=tmp_path / "twice", step=3)
            assert latest(run) == 2
    enough = words(checkpoint__stop_before_minutes=5)
    run_to_the_end(enough, logs=tmp_path / "end", environment=slurm())
    assert_same_run(run, expected=whole)


def latest(run) -> int:
    """The step of the checkpoint that the next start takes."""
    return int((run / "checkpoints" / "latest").read_text().removeprefix("step_"))


def slurm(*, seconds: int = 3600) -> dict[str, str]:
    """Of a job that Slurm will end in so long, by default an hour."""
    return SLURM | {"SLURM_JOB_END_TIME": str(int(time.time()) + seconds)}


def is_stopped_before_the_time_limit_of_slurm(words, *, logs):
    """The limit is near from the start on, so that its speed decides nothing; the doctor would
    refuse to start."""
    nearly_an_hour = slurm(seconds=3590)
    options = words(checkpoint__stop_before_minutes=59.9, doctor__at_start="false")
    job = Job(options, logs=logs, environment=nearly_an_hour)
    assert job.wait() == [3] * 4, job.text()
    assert "stopped by the job's time limit, 59." in job.text()


def leaves_at_once_on_a_second_signal(words, *, logs, step):
    """In `step`; the interval has saved the one before."""
    trigger = Trigger(phase="update_actor", step=step, signals=(signal.SIGTERM, signal.SIGTERM))
    job = Job(
        words(checkpoint__interval_steps=1, checkpoint__asynchronous="false"),
        logs=logs,
        trigger=trigger,
    )
    codes = job.wait()
    assert codes == [1] * 4, job.text()
