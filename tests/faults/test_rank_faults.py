"""One rank raises, exits, is stopped or hangs: the job ends in time, and the first line says why.

By default in a few phases; FAULTS=all takes every phase, as rank_faults.py --all does.
"""

import os

import pytest
from rank_faults import KINDS, PHASES, RankFault, run_side_by_side

FEW = [
    *[("reward", 1, kind) for kind in ("raise", "exit", "stop")],
    *[("update_actor", 1, kind) for kind in ("raise", "exit", "stop")],
    ("rollout", 1, "hang"),
]
ALL = [(phase, step, kind) for phase, step in PHASES for kind in KINDS]
CASES = ALL if os.environ.get("FAULTS") == "all" else FEW
AT_ONCE, LIMIT_SECONDS = 8, 20.0
"""Jobs of two ranks that mostly wait for the limit of a phase."""
LONG_ROLLOUT = "a rollout beyond its own limit"


@pytest.fixture(scope="module")
def outcomes(files, tmp_path_factory):
    """By case: the fault and how its job has ended."""
    folder = tmp_path_factory.mktemp("rank_faults")
    faults = {
        case: RankFault(
            kind=case[2],
            phase=case[0],
            step=case[1],
            rank=(number // 2) % 2,
            note=folder / f"note_{number}",
            limit_seconds=LIMIT_SECONDS,
        )
        for number, case in enumerate(CASES)
    }
    faults[LONG_ROLLOUT] = RankFault(
        kind="hang",
        phase="rollout",
        step=1,
        rank=1,
        note=folder / "note",
        limit_seconds=LIMIT_SECONDS,
        settings={"rollout__timeout_seconds": 15},
    )
    found, cases = {}, list(faults)
    for first in range(0, len(cases), AT_ONCE):
        some = cases[first : first + AT_ONCE]
        ended = run_side_by_side(
            [faults[case] for case in some], files=files, folder=folder / f"from_{first}"
        )
        found |= {case: (faults[case], end) for case, end in zip(some, ended, strict=True)}
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_rank_that_fails_is_named_with_phase_and_cause(outcomes, case):
    fault, outcome = outcomes[case]
    assert outcome.problems(fault) == [], outcome.text


def test_a_rollout_that_takes_too_long_names_its_key(outcomes):
    outcome = outcomes[LONG_ROLLOUT][1]
    assert outcome.codes == [1, 1], outcome.text
    assert outcome.first_line.startswith("error: rank 1 hangs in rollout of step 1: for ")
    assert "the limit is 15 s (rollout.timeout_seconds)" in outcome.first_line
    for rank in (0, 1):  # whose stacks are in the logs
        log = (outcome.folder / "logs" / f"rank_{rank:04d}.log").read_text()
        assert "thread MainThread:" in log and "experience.py" in log
