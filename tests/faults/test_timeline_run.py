"""A real run's timeline: stopped, gone on with, and read back from its files."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from tiny_run import Job, Trigger, run_to_the_end, settings

TWO_RANKS = {
    f"{role}__parallel__pipeline_model_parallel_size": 1 for role in ("actor", "critic", "ref")
}
STEPS = 3


def spans(run: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """(rank, track) -> its events in the order of time."""
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append(event)
    return {key: sorted(of, key=lambda event: event["ts"]) for key, of in found.items()}


def profiles(run: Path) -> dict[str, set[str]]:
    """File -> the names of its events."""
    found = {}
    for path in (run / "profile").iterdir():
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found[path.name] = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    return found


def test_the_timeline_of_a_run_that_was_stopped_and_went_on(files: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = settings(
        files,
        output=run,
        **TWO_RANKS,
        run__steps=STEPS,
        checkpoint__resume="auto",
        logging__trace_steps="all",
        profile__steps=f"[1,{STEPS}]",
        profile__ranks="[1]",
    )
    job = Job(words, logs=tmp_path / "first", world_size=2, trigger=Trigger(phase="value", step=2))
    assert set(job.wait()) == {3}, job.text()
    stopped = spans(run)
    assert {event["args"]["step"] for event in stopped[0, 1]} == {0, 1}

    job = run_to_the_end(words, logs=tmp_path / "second", world_size=2)
    assert "trace.json" in job.text()
    found = spans(run)
    assert sorted(found) == [(rank, track) for rank in (0, 1) for track in (0, 1)]
    for rank in (0, 1):
        phases, steps = found[rank, 0], found[rank, 1]
        assert [event["args"]["step"] for event in steps] == list(range(STEPS + 1))
        for one, other in (*pairwise(phases), *pairwise(steps)):
            assert one["ts"] + one["dur"] <= other["ts"] + 20_000, (one, other)
        for step in steps[1:]:
            inside = [
                event["name"]
                for event in phases
                if event["args"]["step"] == step["args"]["step"] and event["name"] != "checkpoint"
            ]
            assert inside[:3] == ["rollout", "reward", "sleep"] or inside[:2] == [
                "rollout",
                "reward",
            ]
            assert {"log_prob", "value", "update_critic", "update_actor", "reshard"} <= set(inside)
        saved = [event["args"]["step"] for event in phases if event["name"] == "checkpoint"]
        assert saved[0] == 1 or 2 in saved
    for line in (run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        assert 0 < metrics["time/idle_share"] <= metrics["time/idle_share_max"] < 1
    profiled = profiles(run)
    assert sorted(profiled) == ["step_000001_rank_0001.json.gz", "step_000003_rank_0001.json.gz"]
    for names in profiled.values():
        assert {"log_prob", "value", "update_critic", "update_actor", "reshard"} <= names
        assert "aten::mm" in names and any("Backward" in name for name in names)
    assert "  profile/ " in job.text()
