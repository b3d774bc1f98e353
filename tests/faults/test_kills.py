"""A few runs killed at random moments; kill_runs.py says how to kill more, and with vLLM."""

import os

from kill_runs import Killer
from tiny_run import ENGINE

KILLS, IN_SAVE = 2, 1
SEED = int(os.environ.get("FAULTS_SEED", "1"))


def test_killed_runs_resume_bit_equal(files, unbroken):
    killer = Killer(files, engine=ENGINE, seed=SEED, whole_seconds=unbroken.seconds)
    kills = [killer.kill_and_resume(n, in_save=n < IN_SAVE) for n in range(KILLS)]
    print(*kills, sep="\n")
    assert sum(kill.in_save for kill in kills) >= IN_SAVE
