"""Idle shares against hand-drawn timelines, the ledger read again, and the trace's format."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_tools_data import tool

from rlhf_megatron.observability import trace as trace_module
from rlhf_megatron.observability.config import LoggingConfig, parse_steps, refused_trace_steps
from rlhf_megatron.observability.idle import idle_metrics, idle_shares
from rlhf_megatron.observability.ledger import (
    CommunicationRecord,
    PhaseLedger,
    PhaseRecord,
    StepLedger,
    append_ledger,
    merge_ledgers,
)
from rlhf_megatron.observability.ledger_read import read_steps, record_of
from rlhf_megatron.observability.trace import trace_at_end, write_trace

BEGIN = 1_700_000_000.0


def passage(
    phase: str, rank: int, start: float, seconds: float, *, step: int = 1, host: str = ""
) -> PhaseRecord:
    return PhaseRecord(
        step=step,
        rank=rank,
        phase=phase,
        seconds=seconds,
        allocated_gb=1.0,
        reserved_gb=2.0,
        peak_gb=1.5,
        start_unix_seconds=BEGIN + start,
        host=host,
    )


def moved(
    purpose: str, rank: int, seconds: float, *, phase: str = "rollout", step: int = 1
) -> CommunicationRecord:
    return CommunicationRecord(
        step=step,
        rank=rank,
        during_phase=phase,
        purpose=purpose,
        collective="all_gather",
        calls=1,
        bytes=10,
        seconds=seconds,
    )


def step_of_two_ranks(step: int = 1, begin: float = 0.0) -> StepLedger:
    """Rank 1 ends its rollout 2 s early, has no value phase, and waits for 3 s in the exchange."""
    spans = [
        ("rollout", 0, 0, 4),
        ("rollout", 1, 0, 4),
        ("value", 0, 4, 3),
        ("exchange", 0, 7, 1),
        ("exchange", 1, 4, 4),
        ("step", 0, 0, 10),
        ("step", 1, 0, 10),
    ]
    return StepLedger(
        [
            passage(
                phase,
                rank,
                begin + start,
                float(seconds),
                step=step,
                host=f"node{rank}" if phase == "step" else "",
            )
            for phase, rank, start, seconds in spans
        ],
        [moved("exchange", 0, 0.5, step=step), moved("exchange", 1, 2.5, step=step)],
    )


def test_idle_is_outside_phases_and_waiting_where_ranks_join() -> None:
    ledger = step_of_two_ranks()
    shares = idle_shares(ledger.phases, communication=ledger.communication)
    assert shares == {0: pytest.approx(0.2), 1: pytest.approx((2 + 2 + 3) / 10)}
    assert idle_metrics(ledger) == {
        "time/idle_share": pytest.approx(0.45),
        "time/idle_share_max": pytest.approx(0.7),
    }
    assert idle_metrics(StepLedger()) == {}


def test_the_passages_of_a_join_are_taken_one_by_one() -> None:
    phases = [
        passage("exchange", 0, 0, 2.0),
        passage("exchange", 1, 1, 1.0),
        passage("exchange", 0, 6, 1.0),
        passage("exchange", 1, 4, 3.0),
        passage("step", 0, 0, 10.0),
        passage("step", 1, 0, 10.0),
    ]
    # Outside 7 and 6 s; rank 0 waits 1 s in the first passage, rank 1 2 s in the second.
    assert idle_shares(phases) == {0: pytest.approx(0.8), 1: pytest.approx(0.8)}


def test_some_ranks_may_meet_by_themselves_while_others_wait_for_all() -> None:
    spans = [(2, 0, 10), (0, 1, 4), (1, 2, 3), (0, 6, 4), (1, 6, 4)]
    phases = [passage("exchange", rank, start, float(end)) for rank, start, end in spans]
    phases += [passage("step", rank, 0, 10.0) for rank in range(3)]
    # Rank 2 waits until 6; rank 0 one second for rank 1, and two are outside, of rank 1 three.
    assert idle_shares(phases) == {
        0: pytest.approx(0.3),
        1: pytest.approx(0.3),
        2: pytest.approx(0.6),
    }


def test_a_clock_that_is_wrong_leaves_a_share_a_share() -> None:
    phases = [
        passage("reshard", 0, 0, 1.0),
        passage("reshard", 1, 50, 1.0),
        passage("step", 0, 0, 1.0),
        passage("step", 1, 50, 0.5),
    ]
    assert idle_shares(phases) == {0: 0.0, 1: 0.0}


def test_collectives_inside_a_join_and_between_phases_do_not_count_twice() -> None:
    phases = [passage("step", rank, 0, 4.0) for rank in (0, 1)]
    phases += [passage("exchange", rank, 0, 4.0) for rank in (0, 1)]
    waits = [moved("exchange", 1, 3.0, phase="exchange"), moved("exchange", 0, 0.0, phase="")]
    waits += [moved("offload", 1, 2.0), moved("exchange", 0, 0.0, phase="exchange")]
    assert idle_shares(phases, communication=waits) == {0: 0.0, 1: 0.0}


def test_old_records_without_times_give_what_is_outside() -> None:
    rows = [
        asdict(passage(phase, 0, -BEGIN, seconds))
        for phase, seconds in (("rollout", 1.0), ("reshard", 2.0), ("step", 4.0))
    ]
    for row in rows:
        del row["start_unix_seconds"], row["host"]
    found = [record_of(row) for row in rows]
    assert [record.start_unix_seconds for record in found] == [0.0] * 3
    assert idle_shares(found) == {0: 0.25}


@pytest.mark.parametrize(
    "row",
    [
        None,
        [],
        {},
        {"step": 1, "rank": 0, "phase": "rollout"},
        {"step": 1, "rank": 0, "phase": "rollout", "seconds": "1"},
        {"step": True, "rank": 0, "phase": "x", "seconds": 1.0},
        asdict(passage("rollout", 0, 0, float("nan"))),
        asdict(moved("exchange", 0, 1.0)) | {"bytes": 1.5},
    ],
)
def test_what_is_no_record_is_none(row: Any) -> None:
    assert record_of(row) is None


def test_unknown_fields_of_a_newer_version_are_dropped() -> None:
    record = passage("rollout", 0, 0, 1.0)
    assert record_of(asdict(record) | {"new": 1}) == record


def test_a_ledger_is_read_step_by_step_and_no_further_than_wanted(tmp_path: Path) -> None:
    ledgers = [step_of_two_ranks(step, begin=20.0 * step) for step in (1, 2, 3)]
    for ledger in ledgers:
        append_ledger(tmp_path, ledger=ledger)
    path = tmp_path / "ledger.jsonl"
    with path.open("a") as file:
        file.write('{"step": 4, "ra')
    assert list(read_steps(path)) == ledgers
    assert list(read_steps(path, last_step=2)) == ledgers[:2]
    path.write_text("")
    assert list(read_steps(path)) == []


def test_a_phase_between_steps_belongs_to_the_step_before(tmp_path: Path) -> None:
    ledgers = [PhaseLedger(rank=rank, device=torch.device("cpu")) for rank in (0, 1)]
    for ledger in ledgers:
        ledger.start_step(0)
        with ledger.phase("lost"):  # as a setup whose step is never finished
            pass
    for step in (1, 2):
        parts = []
        for ledger in ledgers:
            ledger.start_step(step)
            with ledger.phase("rollout"):
                pass
            parts.append(ledger.finish_step())
            with ledger.phase("checkpoint"):
                pass
        append_ledger(tmp_path, ledger=merge_ledgers(parts))
    found = list(read_steps(tmp_path / "ledger.jsonl"))
    of_step = ["rollout", "step", "rollout", "step"]
    assert [[r.phase for r in part.phases] for part in found] == [
        [*of_step, "checkpoint", "checkpoint"],
        of_step,
    ]
    assert [part.phases[0].step for part in found] == [1, 2]
    first = found[0].phases
    assert first[0].start_unix_seconds <= first[4].start_unix_seconds
    assert first[1].host and not first[0].host
    # The checkpoint, which lies after the step, makes it no less idle.
    assert idle_shares(first)[0] == idle_shares(first[:4])[0] > 0


def read_trace(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    assert_valid(found["traceEvents"])
    return found


def assert_valid(events: Sequence[dict[str, Any]]) -> None:
    """The rules of the trace event format, and that events of a track nest or follow each other."""
    named = set()
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert all(type(event[key]) is int and event[key] >= 0 for key in ("pid", "tid"))
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            wanted = "sort_index" if event["name"] == "process_sort_index" else "name"
            assert list(event["args"]) == [wanted]
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert event["ph"] == "X"
        assert type(event["ts"]) is int and event["ts"] >= 0
        assert type(event["dur"]) is int and event["dur"] >= 0
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    assert set(tracks) == named
    for spans in tracks.values():
        spans.sort()
        for (ts, dur), (after, _) in pairwise(spans):
            assert ts + dur <= after + 100, "phases of a rank do not overlap"


def test_the_trace_has_every_phase_at_its_time(tmp_path: Path) -> None:
    for step in (1, 2):
        append_ledger(tmp_path, ledger=step_of_two_ranks(step, begin=20.0 * step))
    written = write_trace(tmp_path)
    found = read_trace(written.path)
    assert written.path == tmp_path / "trace.json" and written.steps == (1, 2)
    assert (written.num_ranks, written.num_events, written.untimed) == (2, 14, 0)
    assert found["otherData"] == {"started_unix_seconds": BEGIN + 20}
    names = [e for e in found["traceEvents"] if e["ph"] == "M" and e["name"] == "process_name"]
    assert [(e["pid"], e["args"]["name"]) for e in names] == [
        (0, "rank 0 (node0)"),
        (1, "rank 1 (node1)"),
    ]
    spans = {
        (e["pid"], e["tid"], e["name"], e["args"]["step"]): (e["ts"], e["dur"])
        for e in found["traceEvents"]
        if e["ph"] == "X"
    }
    assert spans[0, 0, "value", 1] == (4_000_000, 3_000_000)
    assert spans[1, 0, "exchange", 2] == (24_000_000, 4_000_000)
    assert spans[1, 1, "step 2", 2] == (20_000_000, 10_000_000)
    rollout = next(e for e in found["traceEvents"] if e["name"] == "rollout" and e["pid"] == 1)
    assert rollout["args"]["exchange all_gather bytes"] == 10
    assert rollout["args"]["exchange all_gather seconds"] == 2.5
    assert rollout["args"]["peak_gb"] == 1.5


def test_steps_are_chosen_and_the_file_is_bounded(tmp_path: Path, monkeypatch: Any) -> None:
    for step in range(1, 6):
        append_ledger(tmp_path, ledger=step_of_two_ranks(step, begin=20.0 * step))
    written = write_trace(tmp_path, steps="2-3,5", output=tmp_path / "some.json")
    steps = {e["args"].get("step") for e in read_trace(written.path)["traceEvents"]} - {None}
    assert steps == {2, 3, 5}
    monkeypatch.setattr(trace_module, "MOST_EVENTS", 15)
    bounded = trace_at_end(tmp_path, steps="all")
    assert bounded is not None
    assert (bounded.steps, bounded.steps_left_out) == ((1, 2), 3)
    assert "3 further steps are left out" in str(bounded)


def test_a_trace_that_cannot_be_written_does_not_end_a_run(
    tmp_path: Path, monkeypatch: Any
) -> None:
    assert trace_at_end(tmp_path, steps="all") is None
    append_ledger(tmp_path, ledger=step_of_two_ranks(9))
    assert trace_at_end(tmp_path, steps="") is None
    assert trace_at_end(tmp_path, steps="1-3") is None
    monkeypatch.setattr(trace_module, "read_steps", lambda *_, **__: 1 / 0)
    assert trace_at_end(tmp_path, steps="all") is None
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"]


def test_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = tool("trace").main
    append_ledger(tmp_path, ledger=step_of_two_ranks())
    assert main([str(tmp_path), "--steps", "1"]) == 0
    assert "steps 1 to 1, 2 ranks, 7 events" in capsys.readouterr().out
    for words, message in (
        ([str(tmp_path / "none")], "no such file"),
        ([str(tmp_path), "--steps", "2-1"], "steps 2-1: '2-1' is not ascending; give"),
        ([str(tmp_path), "--steps", "7"], "holds none of the steps 7; give others"),
        ([str(tmp_path), "--output", str(tmp_path / "none" / "x.json")], "cannot be written"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_the_tool_says_that_an_old_run_has_no_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = asdict(passage("rollout", 0, 0, 1.0))
    del row["start_unix_seconds"]
    (tmp_path / "ledger.jsonl").write_text(json.dumps(row) + "\n")
    assert tool("trace").main([str(tmp_path)]) == 2
    assert "written by an older version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "steps"),
    [("all", None), ("", []), ("3", [3]), ("1-3", [1, 2, 3]), (" 1-2, 5 ", [1, 2, 5])],
)
def test_steps_in_words(text: str, steps: list[int] | None) -> None:
    found = parse_steps(text)
    assert (found if found is None else [step for part in found for step in part]) == steps


@pytest.mark.parametrize("text", ["x", "1-", "-3", "3-1", "5,1", "1-4,4", "1,,2", "all,1"])
def test_steps_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is n"):
        parse_steps(text)
    (problem,) = refused_trace_steps(LoggingConfig(trace_steps=text))
    assert problem.startswith(f"logging.trace_steps={text}: ") and "; give" in problem
