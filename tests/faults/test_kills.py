"""A few runs killed at random moments; kill_runs.py says how to kill more, and with vLLM."""

import os
import signal

from kill_runs import Killer
from tiny_run import ENGINE, Job, Trigger, assert_same_run, run_to_the_end, settings

KILLS, IN_SAVE = 2, 1
SEED = int(os.environ.get("FAULTS_SEED", "1"))


def test_killed_runs_resume_bit_equal(files, unbroken):
    killer = Killer(files, engine=ENGINE, seed=SEED, whole_seconds=unbroken.seconds)
    kills = [killer.kill_and_resume(n, in_save=n < IN_SAVE) for n in range(KILLS)]
    print(*kills, sep="\n")
    assert sum(kill.in_save for kill in kills) >= IN_SAVE


def test_a_run_killed_before_its_first_step_begins_anew(files, whole, tmp_path):
    """Its evaluation before the first step was written already."""
    words = settings(files, output=tmp_path / "run", run__overwrite=True)
    trigger = Trigger(phase="rollout", step=1, signals=(signal.SIGKILL,))
    codes = Job(words, logs=tmp_path / "killed", trigger=trigger).wait()
    assert codes[0] == -signal.SIGKILL
    run_to_the_end(words, logs=tmp_path / "again")
    assert_same_run(tmp_path / "run", expected=whole)
