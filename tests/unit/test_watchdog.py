"""Whom the watchdog blames, and the limits of the phases."""

import pytest

from rlhf_megatron.config import load_config
from rlhf_megatron.distributed import heartbeat
from rlhf_megatron.distributed.heartbeat import Position, Stay
from rlhf_megatron.distributed.watchdog import (
    Alarm,
    RankReport,
    SilentRank,
    describe,
    main_thread_frames,
    ranks_in_words,
    report_of_this_rank,
)
from rlhf_megatron.faults_config import FaultsConfig, phase_limit, refused_phase_limits
from rlhf_megatron.validation import validate

ALARM = Alarm(
    rank=0,
    phase="reward of step 2",
    seconds=31.0,
    limit_seconds=30.0,
    limit_key="faults.phase_limit_seconds",
)


def report(rank: int, *, number: int = 5, waits_in: str = "", phase: str = "reward of step 2"):
    return RankReport(
        rank=rank,
        phase=phase,
        number=number,
        seconds=31.0,
        waits_in=waits_in,
        place=f"file_{rank}.py:7 work",
        stack=f"  frames of {rank}\n",
    )


def first_line(reports, silent=()) -> str:
    return describe(ALARM, reports=reports, silent=silent).splitlines()[0]


def test_the_rank_that_waits_for_no_other_is_to_blame():
    ranks = [report(r, waits_in="all_reduce") for r in (0, 1, 3)]
    text = describe(ALARM, reports=[*ranks, report(2)], silent=[])
    lines = text.splitlines()
    assert lines[0].startswith("rank 2 hangs in reward of step 2: for 31 s, the limit is 30 s")
    assert "it is at file_2.py:7 work, and the others wait" in lines[0]
    assert "  frames of 2" in text and "  frames of 0" not in text


def test_the_rank_that_is_furthest_behind_is_to_blame():
    ahead = [report(r, number=6, phase="log_prob of step 2") for r in (0, 1)]
    line = first_line([*ahead, report(2, waits_in="all_gather_object")])
    assert line.startswith("rank 2 hangs in reward of step 2: ")
    assert "it waits in all_gather_object" in line


def test_where_all_wait_nobody_is_to_blame():
    line = first_line([report(r, waits_in="all_reduce") for r in range(3)])
    assert line.startswith("rank 0 hangs in reward of step 2: all ranks wait in a collective")


def test_ranks_that_do_not_answer_come_first():
    silent = [
        SilentRank(rank=5, phase="sleep of step 2", number=7, process="is on another node"),
        SilentRank(rank=4, phase="reward of step 2", number=5, process="is stopped"),
    ]
    text = describe(ALARM, reports=[report(0, waits_in="all_reduce"), report(1)], silent=silent)
    start = "rank 4 (and 1 more ranks) stopped responding in reward of step 2: its process is "
    assert text.startswith(start)
    assert "rank 0 has been in reward of step 2 for 31 s, the limit is 30 s" in text
    assert "  rank 5: no answer; last seen in sleep of step 2" in text


def test_ranks_that_do_the_same_are_one_line():
    alike = [
        RankReport(r, "value of step 1", 3, 9.0, "all_reduce", "model_engine.py:190 infer", "")
        for r in (0, 1, 2, 5)
    ]
    text = describe(ALARM, reports=alike, silent=[])
    assert text.count("waits in all_reduce") == 1
    assert "  ranks 0-2, 5: value of step 1 for 9 s, waits in all_reduce, model_eng" in text
    assert ranks_in_words([3]) == "rank 3"


def test_a_report_says_where_the_main_thread_is():
    position = Position("value of step 1", 4)
    found = report_of_this_rank(3, position=position, seconds=1.0, frames=main_thread_frames())
    assert found.waits_in == "" and "main_thread_frames" in found.stack
    assert (found.rank, found.phase, found.number) == (3, "value of step 1", 4)


@pytest.fixture
def clock(monkeypatch):
    """time.monotonic() of the heartbeat: clock[0]."""
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    return now


def test_a_stay_begins_anew_where_the_position_changes(clock):
    stay, position = Stay(), Position("reward of step 1", 1, 5.0, "key")
    stay.see(position)
    for _ in range(6):
        assert not stay.is_overdue()
        clock[0] += 1.0
        stay.see(position)
    assert stay.is_overdue() and not stay.is_overdue(grace_seconds=3.0)
    assert stay.seconds == 6.0
    stay.see(Position("reward of step 1", 2, 5.0, "key"))  # entered again
    assert not stay.is_overdue()
    for _ in range(9):
        clock[0] += 1.0
        stay.see(Position("setup", 3))
    assert not stay.is_overdue()  # no limit


def test_the_time_in_which_a_job_was_suspended_does_not_count(clock):
    stay = Stay()
    stay.see(Position("reward of step 1", 1, 60.0, "key"))
    clock[0] += 3600.0
    stay.see(Position("reward of step 1", 1, 60.0, "key"))
    assert stay.seconds == heartbeat.LONGEST_STEP_SECONDS and not stay.is_overdue()


@pytest.mark.parametrize(
    ("phase", "seconds", "key"),
    [
        ("value", 100.0, "faults.phase_limit_seconds"),
        ("", 100.0, "faults.phase_limit_seconds"),
        ("reward", 7.0, "faults.phase_limits.reward"),
        ("evaluation_reward", 7.0, "faults.phase_limits.reward"),
        ("rollout", 50.0, "rollout.timeout_seconds"),
        ("evaluation_rollout", 9.0, "faults.phase_limits.evaluation_rollout"),
        ("checkpoint", 0.0, "faults.phase_limits.checkpoint"),
        ("setup", 0.0, "faults.phase_limits.setup"),
    ],
)
def test_limits_of_phases(phase, seconds, key):
    faults = FaultsConfig(
        phase_limit_seconds=100.0,
        phase_limits={"reward": 7, "evaluation_rollout": 9.0, "checkpoint": 0},
    )
    limit = phase_limit(faults, phase=phase, rollout_timeout_seconds=50.0)
    assert (limit.seconds, limit.key) == (seconds, key)


def test_limits_are_refused_by_name():
    limits = {"rewards": 3, "value": "long", "sleep": -1, "reward": 2.5, "setup": 900}
    problems = refused_phase_limits(limits | {"rollout": 601}, timeout_seconds=600.0)
    assert [problem.split(":")[0].split("=")[0] for problem in problems] == [
        "faults.phase_limits.rewards",
        "faults.phase_limits.value",
        "faults.phase_limits.sleep",
        "faults.phase_limits.rollout",
    ]
    assert problems[-1].startswith(
        "faults.phase_limits.rollout=601: above distributed.timeout_seconds=600"
    )


def test_limits_may_be_given_on_the_command_line():
    config = load_config(
        [], overrides=["faults.phase_limits.reward=30", "faults.phase_limits.value=0"]
    )
    assert config.faults.phase_limits == {"reward": 30, "value": 0}
    problems = validate(
        load_config([], overrides=["faults.phase_limits={rollouts: 5}"]), world_size=1
    )
    assert any(problem.startswith("faults.phase_limits.rollouts: no such") for problem in problems)
