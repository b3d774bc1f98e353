"""The profiler of single steps, on a ledger alone."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_megatron.observability import profiler
from rlhf_megatron.observability.config import ProfileConfig, refused_profile
from rlhf_megatron.observability.ledger import PhaseLedger

CPU = torch.device("cpu")


def ledger_with_profiler(folder: Path, *, rank: int = 1, **options: Any) -> PhaseLedger:
    ledger = PhaseLedger(rank=rank, device=CPU)
    ledger.start_step(0)
    config = ProfileConfig(**options)
    profiler.watch_phases(ledger, config=config, output_dir=folder, device=CPU)
    return ledger


def run_step(ledger: PhaseLedger, step: int) -> None:
    ledger.start_step(step)
    with ledger.phase("rollout"):
        torch.zeros(3).sin()
    with ledger.phase("update_actor"):
        torch.zeros(3, 3) @ torch.zeros(3, 3)
    ledger.finish_step()


def events_of(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Name -> begin and end of each of its events."""
    found: dict[str, list[tuple[float, float]]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for event in json.load(file)["traceEvents"]:
            if event["ph"] == "X":
                begin = float(event["ts"])
                found.setdefault(event["name"], []).append((begin, begin + float(event["dur"])))
    return found


def test_the_chosen_steps_are_traced_with_their_phases(tmp_path):
    ledger = ledger_with_profiler(tmp_path, steps=[2, 4], ranks=[1])
    for step in range(1, 5):
        run_step(ledger, step)
    written = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert written == ["step_000002_rank_0001.json.gz", "step_000004_rank_0001.json.gz"]
    for name in written:
        events = events_of(tmp_path / "profile" / name)
        for phase, op in (("rollout", "aten::sin"), ("update_actor", "aten::mm")):
            ((begin, end),) = events[phase]
            assert events[op]
            assert all(begin <= first <= last <= end for first, last in events[op])


def test_other_ranks_and_no_steps_hang_nothing_on_the_ledger(tmp_path):
    for options in ({"steps": [1], "ranks": [0, 2]}, {"ranks": [1]}):
        ledger = ledger_with_profiler(tmp_path, **options)
        assert not ledger.listeners and not ledger.step_listeners
        run_step(ledger, 1)
    assert not list(tmp_path.iterdir())


def test_a_phase_that_raised_and_a_step_given_up_leave_no_range_open(tmp_path):
    ledger = ledger_with_profiler(tmp_path, steps=[1, 2], ranks=[1])
    ledger.start_step(1)
    with pytest.raises(ValueError, match="given up"), ledger.phase("reward"):
        raise ValueError("given up")
    run_step(ledger, 2)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == [
        "step_000002_rank_0001.json.gz"
    ]
    events = events_of(tmp_path / "profile" / "step_000002_rank_0001.json.gz")
    assert "rollout" in events and "reward" not in events


@pytest.mark.parametrize("method", ["__init__", "start", "stop", "export_chrome_trace"])
def test_a_profiler_that_fails_does_not_fail_the_run(tmp_path, monkeypatch, caplog, method):
    plain = getattr(profiler.profile, method)

    def fails(*arguments: Any, **options: Any) -> None:
        if method == "stop":  # or it would go on into other tests
            plain(*arguments, **options)
        raise RuntimeError("no CUPTI here")

    with caplog.at_level(logging.WARNING, logger=profiler.logger.name):
        with monkeypatch.context() as patch:
            patch.setattr(profiler.profile, method, fails)
            ledger = ledger_with_profiler(tmp_path, steps=[1, 3], ranks=[1])
            run_step(ledger, 1)
        (message,) = caplog.messages
        assert message.startswith("profile.steps: the profiler could not ")
        assert message.endswith("no CUPTI here")
    run_step(ledger, 3)
    assert [path.name for path in tmp_path.glob("profile/step_*")] == [
        "step_000003_rank_0001.json.gz"
    ]


def test_nvtx_ranges_begin_and_end_with_the_phases(monkeypatch):
    open_ranges: list[str] = []
    seen: list[str] = []

    def start(name: str) -> int:
        open_ranges.append(name)
        seen.append(name)
        return len(open_ranges)

    def end(number: int) -> None:
        assert number == 1
        open_ranges.pop()

    monkeypatch.setattr(torch.cuda.nvtx, "range_start", start)
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", end)
    ledger = PhaseLedger(rank=0, device=CPU)
    ledger.listeners.append(profiler.NvtxRanges())
    with pytest.raises(ValueError, match="given up"), ledger.phase("reward"):
        raise ValueError("given up")
    run_step(ledger, 1)
    assert seen == ["reward", "rollout", "update_actor"] and not open_ranges


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": [3, 0]}, "profile.steps=[3, 0]: steps count from 1"),
        ({"ranks": [0, 4]}, "profile.ranks=[0, 4]: this run has the ranks 0 to 3"),
        ({"ranks": [-1]}, "profile.ranks=[-1]: this run has the ranks 0 to 3"),
    ],
)
def test_steps_and_ranks_that_there_are_not(options, words):
    assert refused_profile(ProfileConfig(**options), world_size=4) == [words]
    assert refused_profile(ProfileConfig(steps=[1], ranks=[0, 3]), world_size=4) == []
