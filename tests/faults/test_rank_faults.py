"""One rank raises, exits, is stopped or hangs: the job ends in time, and the first line says why.

By default in a few phases; FAULTS=all takes every phase, as rank_faults.py --all does.
"""

import os

import pytest
from rank_faults import KINDS, PHASES, RankFault, run_with

FEW = [
    *[("reward", 1, kind) for kind in ("raise", "exit", "stop")],
    *[("update_actor", 1, kind) for kind in ("raise", "exit", "stop")],
    ("rollout", 1, "hang"),
]
ALL = [(phase, step, kind) for phase, step in PHASES for kind in KINDS]
CASES = ALL if os.environ.get("FAULTS") == "all" else FEW


@pytest.mark.parametrize(("phase", "step", "kind"), CASES)
def test_a_rank_that_fails_is_named_with_phase_and_cause(files, tmp_path, phase, step, kind):
    rank = (CASES.index((phase, step, kind)) // 2) % 2
    note = tmp_path / "note"
    fault = RankFault(kind=kind, phase=phase, step=step, rank=rank, note=note)
    outcome = run_with(fault, files=files, folder=tmp_path)
    assert outcome.problems(fault) == [], outcome.text


def test_a_rollout_that_takes_too_long_names_its_key(files, tmp_path):
    fault = RankFault(kind="hang", phase="rollout", step=1, rank=1, note=tmp_path / "note")
    outcome = run_with(fault, files=files, folder=tmp_path, rollout__timeout_seconds=20)
    assert outcome.codes == [1, 1], outcome.text
    assert outcome.first_line.startswith("error: rank 1 hangs in rollout of step 1: for ")
    assert "the limit is 20 s (rollout.timeout_seconds)" in outcome.first_line
    for rank in (0, 1):  # whose stacks are in the logs
        log = (tmp_path / "run" / "logs" / f"rank_{rank:04d}.log").read_text()
        assert "thread MainThread:" in log and "experience.py" in log
