"""Runs killed at random moments; kill_runs.py says how to kill more, and it does so with vLLM."""

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from kill_runs import Killer
from tiny_run import ENGINE, STEPS, Job, Trigger, assert_same_run, run_to_the_end

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("FAULTS_SEED", "1"))


def test_a_run_killed_three_times_is_the_one_that_never_was(files, unbroken, tmp_path):
    """Before its first step, in a save, and at a random moment."""
    killer = Killer(files, engine=ENGINE, seed=SEED, whole_seconds=unbroken.seconds)
    run = tmp_path / "run"
    in_background, at_once = (killer.words(run, asynchronous=value) for value in (True, False))
    # The evaluation before the first step was written already.
    trigger = Trigger(phase="rollout", step=1, signals=(signal.SIGKILL,))
    codes = Job(in_background, logs=tmp_path / "killed", trigger=trigger).wait()
    assert codes[0] == -signal.SIGKILL

    tries = (killer.kill(run, words=in_background, number=0, skip_saves=1) for _ in range(STEPS))
    in_save = next(kill for kill in tries if kill is not None)
    assert in_save.in_save
    # It has more to do than it had done when it was killed.
    moment = random.Random(SEED).uniform(0.2, in_save.seconds)
    at_random = killer.kill(run, words=at_once, number=1, moment=moment)
    assert at_random is not None
    print(in_save, at_random, sep="\n")

    run_to_the_end(at_once, logs=tmp_path / "end")
    assert_same_run(run, expected=unbroken.folder)


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(ENGINE == "vllm", reason="the others do it")
@pytest.mark.skipif(
    os.environ.get("FAULTS") != "all", reason="takes minutes to differ in one engine: FAULTS=all"
)
def test_a_run_with_vllm_killed_in_a_save_is_the_one_that_never_was():
    """In processes forked from one that has imported vLLM, apart from the other tests'."""
    words = ["--engine", "vllm", "--small", "--kills", "1", "--in-save", "1", "--seed", str(SEED)]
    process = subprocess.Popen(
        [sys.executable, "tests/faults/kill_runs.py", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate()
    finally:
        with suppress(ProcessLookupError):  # all of them are gone, unless this was interrupted
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
    assert "vllm: 1 of 1 killed runs resumed bit-equal, 1 of them killed in a save" in said
