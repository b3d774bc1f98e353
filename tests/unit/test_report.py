"""report.html: the charts' numbers are the files' numbers, and nothing in a run breaks the page."""

import json
import logging
import math
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from report_runs import EVIL, PHASES, Page, ledger_rows, metrics_row, write_lines, write_run
from test_tools_data import tool

from rlhf_megatron.errors import UserError
from rlhf_megatron.observability.logs import setup_logging
from rlhf_megatron.observability.report import INSTALL, report_at_end, write_report
from rlhf_megatron.observability.report_data import read_runs
from rlhf_megatron.observability.report_lines import EVALUATION_LINES, TRAINING_LINES
from rlhf_megatron.observability.report_page import json_for_script
from rlhf_megatron.resume import note_lines

pytest.importorskip("plotly", reason="plotly is not installed here")


@pytest.fixture(autouse=True)
def package_logger():
    """As it is outside a run, before and after: setup_logging keeps its records from pytest."""
    logger = logging.getLogger("rlhf_megatron")
    handlers, level = list(logger.handlers), logger.level
    logger.propagate = True
    yield
    for handler in [h for h in logger.handlers if h not in handlers]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)
    logger.propagate = True


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def report_of(*folders) -> Page:
    return Page.read(write_report(folders).path)


def test_every_line_has_the_numbers_of_the_files(tmp_path):
    run = write_run(tmp_path / "run")
    metrics, evaluations = rows_of(run / "metrics.jsonl"), rows_of(run / "evaluations.jsonl")
    page, found = report_of(run), 0
    for spec, rows in [(s, metrics) for s in TRAINING_LINES] + [
        (s, evaluations) for s in EVALUATION_LINES
    ]:
        keys = [key for key in spec.keys if key in rows[-1]]
        if not keys:
            assert spec.title not in page.figures
            continue
        for key, trace in zip(keys, page.lines(spec.title), strict=True):
            assert trace["x"] == [row["step"] for row in rows]
            assert trace["y"] == [row[key] for row in rows]
            found += 1
    assert found == 24
    left, right = page.lines("Throughput and memory")
    assert left["y"] == [row["train/throughput_tokens_per_sec"] for row in metrics]
    assert right["y"] == [row["gpu/memory_active_gb"] for row in metrics]
    assert (left["yaxis"], right["yaxis"]) == ("y", "y2")
    assert page.figures["Throughput and memory"]["layout"]["yaxis2"]["side"] == "right"


def test_the_band_is_the_spread_of_the_reward(tmp_path):
    run = write_run(tmp_path / "run")
    rows = rows_of(run / "metrics.jsonl")
    band = report_of(run).figures["Reward"]["data"][0]
    upper = [row["reward/mean"] + row["reward/std"] for row in rows]
    lower = [row["reward/mean"] - row["reward/std"] for row in rows]
    assert band["name"] == "band" and band["y"] == upper + lower[::-1]


def test_time_and_memory_by_phase(tmp_path):
    run = write_run(tmp_path / "run")
    plan = {"phases": {phase: {"peak_gb": 0.7} for phase in PHASES} | {"odd": {}}}
    (run / "memory_plan.json").write_text(json.dumps(plan))
    metrics, page = rows_of(run / "metrics.jsonl"), report_of(run)
    stacks = {trace["name"]: trace["y"] for trace in page.lines("Time per phase")}
    for phase in PHASES:
        assert stacks[phase] == [row[f"time/{phase}_seconds"] for row in metrics]
    for number, row in enumerate(metrics):  # with what is outside, the whole step
        assert sum(y[number] for y in stacks.values()) == pytest.approx(row["time/step_seconds"])
    (mean,) = page.lines("Mean time per step")
    for phase, seconds in zip(mean["y"], mean["x"], strict=True):
        assert seconds == pytest.approx(sum(stacks[phase]) / len(metrics))

    peaks: dict[str, float] = {}
    for row in rows_of(run / "ledger.jsonl"):
        peaks[row["phase"]] = max(peaks.get(row["phase"], 0), row["peak_gb"])
    for row in metrics:
        for phase in PHASES:
            peaks[phase] = max(peaks[phase], row[f"memory/{phase}_peak_gb"])
    measured, planned = page.lines("Peak memory")
    assert dict(zip(measured["y"], measured["x"], strict=True)) == {p: peaks[p] for p in PHASES}
    assert planned["x"] == [0.7] * len(PHASES)
    above = [phase for phase in PHASES if peaks[phase] > 0.7]
    assert above and all(f"memory in {phase} was" in page.text for phase in above)
    assert page.text.count("above the planned") == len(above)


def test_untrusted_text_stays_text(tmp_path):
    run = write_run(tmp_path / "run", response=EVIL, name=EVIL)
    other = write_run(tmp_path / EVIL.replace("/", ""), name=EVIL)
    logger = setup_logging(run, rank=0)
    logger.warning("reward failed: %s", EVIL)
    metrics = rows_of(run / "metrics.jsonl")
    write_lines(run / "metrics.jsonl", [row | {f"time/{EVIL}_seconds": 3.0} for row in metrics])
    clean = report_of(write_run(tmp_path / "clean"))
    page = report_of(run, other)
    assert EVIL in page.text and "prompt 1 <b>" in page.text
    assert page.tags["script"] == clean.tags["script"] == 3
    assert "img" not in page.tags and page.handlers == []
    names = [trace["name"] for figure in page.figures.values() for trace in figure["data"]]
    assert names and not any("<" in name for name in names)  # plotly takes some HTML in names
    assert Page.read(write_report([run]).path).tags["script"] == 3


def test_json_in_a_script_cannot_end_it():
    text = json_for_script({"a": [EVIL, "<!--", "]]>", "&lt;"]})
    assert json.loads(text) == {"a": [EVIL, "<!--", "]]>", "&lt;"]}
    assert not set("<>&") & set(text)


def test_several_runs_share_their_charts(tmp_path):
    runs = [write_run(tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 2))]
    page = report_of(*runs)
    for title in ("Reward", "Entropy", "Peak memory", "Mean time per step", "Held-out reward"):
        assert [trace["name"] for trace in page.lines(title)] == ["a", "b"]
    for run, trace in zip(runs, page.lines("Reward"), strict=True):
        assert trace["y"] == [row["reward/mean"] for row in rows_of(run / "metrics.jsonl")]
    first, second = (trace["line"]["color"] for trace in page.lines("Reward"))
    assert first != second
    assert {"Time per phase: a", "Time per phase: b"} <= page.figures.keys()
    scales = [page.figures[f"Time per phase: {n}"]["layout"]["yaxis"]["range"] for n in "ab"]
    assert scales[0] == scales[1]
    differing = page.text.partition("Keys in which the runs differ:")[2]
    assert "run.seed12" in differing and "run.steps66" not in differing


def test_labels_tell_runs_apart(tmp_path):
    runs = [write_run(tmp_path / name / "run") for name in ("a", "b")]
    assert [run.label for run in read_runs(runs)] == ["a/run", "b/run"]
    assert [run.label for run in read_runs([runs[0], runs[0]])] == ["run #1", "run #2"]


def test_a_run_that_is_going_with_a_torn_line(tmp_path):
    run = write_run(tmp_path / "run", steps=3)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 4, "reward/me')
    page = report_of(run)
    assert page.lines("Reward")[0]["x"] == [1, 2, 3]
    assert "3 of 6; the last one written" in page.text
    assert "metrics.jsonl: the last line is incomplete" in page.text
    assert "ledger.jsonl: the last line is incomplete" in page.text


def test_damaged_lines_are_counted(tmp_path):
    run = write_run(tmp_path / "run", steps=2)
    good = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(b'\xff\xfe\n[1]\n{"step": "x"}\n' + good)
    page = report_of(run)
    assert page.lines("Reward")[0]["x"] == [1, 2]
    assert "metrics.jsonl: 3 damaged lines left out" in page.text


def test_the_last_line_of_a_step_counts(tmp_path):
    run = write_run(tmp_path / "run", steps=2)
    again = metrics_row(2) | {"reward/mean": 0.875}
    write_lines(run / "metrics.jsonl", [metrics_row(1), metrics_row(2), metrics_row(3), again])
    (trace,) = report_of(run).lines("Reward")
    assert (trace["x"], trace["y"][1]) == ([1, 2, 3], 0.875)


def test_figures_that_are_not_finite_are_gaps_and_named(tmp_path):
    run = write_run(tmp_path / "run")
    rows = rows_of(run / "metrics.jsonl")
    rows[1] |= {"reward/mean": None, "nonfinite": ["reward/mean"]}  # as MetricsWriter writes it
    rows[3] |= {"grad_norm/actor": math.nan, "reward/std": math.inf}
    write_lines(run / "metrics.jsonl", rows)
    page = report_of(run)
    (reward,), (norm,) = page.lines("Reward"), page.lines("Gradient norm, actor")
    assert [step for step, y in zip(reward["x"], reward["y"], strict=True) if y is None] == [2]
    assert [step for step, y in zip(norm["x"], norm["y"], strict=True) if y is None] == [4]
    assert "reward/mean is not finite in step 2" in page.text
    assert "grad_norm/actor is not finite in step 4" in page.text
    assert "reward/std is not finite in step 4" in page.text


def test_no_step_yet(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("run: {name: first, steps: 9}\n")
    page = report_of(run)
    assert page.figures == {} and "holds no step yet" in page.text and "0 of 9" in page.text
    (run / "metrics.jsonl").write_text("")
    assert "ledger.jsonl is missing" in report_of(run).text


@pytest.mark.parametrize("name", ["ledger.jsonl", "config.yaml", "evaluations.jsonl", "rollouts"])
def test_a_missing_file_costs_only_what_it_holds(tmp_path, name):
    run = write_run(tmp_path / "run")
    (run / name).rename(tmp_path / "aside")
    page = report_of(run)
    assert page.lines("Reward")[0]["x"] == [1, 2, 3, 4, 5, 6]
    if name in ("ledger.jsonl", "config.yaml"):
        assert f"{name} is missing" in page.text
    (memory,) = page.lines("Peak memory")  # the metrics have the worst rank's
    assert sorted(memory["y"]) == sorted(PHASES)


@pytest.mark.parametrize("text", ["[", "{}", "[1, 2]", '{"phases": {"rollout": {"peak_gb": "x"}}}'])
def test_a_plan_that_makes_no_sense_is_left_out(tmp_path, text):
    run = write_run(tmp_path / "run")
    (run / "memory_plan.json").write_text(text)
    assert len(report_of(run).lines("Peak memory")) == 1


def test_a_plan_as_the_planner_prints_it(tmp_path):
    run = write_run(tmp_path / "run")
    ranks = [
        {"phases": [{"phase": "rollout", "total_bytes": 9e9, "allocated_bytes": n * 10**9}]}
        for n in (2, 3)
    ]
    (run / "memory_plan.json").write_text(json.dumps({"ranks": ranks, "fits": True}))
    assert read_runs([run])[0].planned_gb == {"rollout": 3.0}


def test_thousands_of_steps_stay_small_and_say_so(tmp_path):
    run, steps = write_run(tmp_path / "run"), 3000
    rows = [metrics_row(step) for step in range(1, steps + 1)]
    rows[1234]["grad_norm/actor"] = 777.0
    write_lines(run / "metrics.jsonl", rows)
    write_lines(run / "ledger.jsonl", [r for s in range(steps) for r in ledger_rows(s, ranks=1)])
    long = "word <&> " * 4000
    sample = {"prompt": long, "response": long, "reward": 1.0, "truncated": True}
    for step in range(1, steps + 1, 10):
        write_lines(run / "rollouts" / f"step_{step:06d}.jsonl", [sample] * 8)
    written = write_report([run, run, run])
    assert written.num_bytes < 10e6
    page = Page.read(written.path)
    assert len(page.lines("Reward")[0]["x"]) == 1000
    assert page.lines("Reward")[0]["x"][-1] == steps
    first = [row["reward/mean"] for row in rows[:3]]
    assert page.lines("Reward")[0]["y"][0] == pytest.approx(sum(first) / 3)
    assert "each point the mean of 3 steps" in page.text
    assert max(page.lines("Gradient norm, actor")[0]["y"]) == 777.0
    assert "each point the largest of 3 steps" in page.text
    assert "12 of 305 steps" in page.text and "6 of 8 responses" in page.text
    assert "characters left out" in page.text


def test_samples_are_the_best_the_worst_and_some_between(tmp_path):
    run = write_run(tmp_path / "run", steps=1)
    rows: list[dict[str, Any]] = [
        {"prompt": "p", "response": f"r{n}", "reward": n / 10, "truncated": False}
        for n in range(50)
    ]
    rows[7]["reward"] = None
    write_lines(run / "rollouts" / "step_000001.jsonl", rows)
    (run / "rollouts" / "step_000002.jsonl.partial").write_text("x")
    samples = read_runs([run])[0].samples
    assert samples.num_files == 1 and samples.num_responses == {1: 50}
    found = [sample.response for sample in samples.by_step[1]]
    assert (found[0], found[-1], len(found)) == ("r49", "r7", 6)
    assert [int(r[1:]) for r in found[:-1]] == sorted(
        (int(r[1:]) for r in found[:-1]), reverse=True
    )


def test_events_from_the_log_and_the_metrics(tmp_path):
    run = write_run(tmp_path / "run")
    logger = setup_logging(run, rank=0)
    checkpoint = run / "checkpoints" / "step_000003"
    point = SimpleNamespace(
        folder=checkpoint, step=3, notes=(), manifest=SimpleNamespace(versions={"torch": "2"})
    )
    logger.info(note_lines(cast(Any, point))[0])
    logger.info("skipped: update_actor of step 4, update 1 of 2: its gradient is not finite")
    logger.info("wrote %s", checkpoint)
    logger.info("layer_spec auto: local")
    logger.error("the password=hunter2hunter2 was refused")
    rows = rows_of(run / "metrics.jsonl")
    rows[3]["faults/skipped_updates"] = 1.0
    rows[4]["faults/skipped_updates"] = 2.0
    write_lines(run / "metrics.jsonl", rows)
    events = read_runs([run])[0].events
    assert [(event.kind, event.step) for event in events] == [
        ("resume", 3),
        ("skipped", 4),
        ("checkpoint", 3),
        ("problem", None),
        ("skipped", 5),
    ]
    assert events[2].text == "wrote checkpoints/step_000003"
    assert "hunter2" not in events[3].text
    page = report_of(run)
    assert "3 skipped updates, in steps 4, 5" in page.text
    assert len(page.figures["Reward"]["layout"]["shapes"]) == 3
    assert "upright dashes: resumed; upright dots: updates skipped" in page.text


def test_the_configuration_is_whole_but_for_secrets(tmp_path):
    run = write_run(tmp_path / "run")
    page = report_of(run)
    text = (run / "report.html").read_text()
    assert "hunter2" not in text and "me:pass" not in text
    assert "max_response_tokens: 12" in page.text and "api_key: (redacted)" in page.text
    shown = read_runs([run])[0].config
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert shown["run"] == written["run"] and shown["rollout"] == written["rollout"]


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError) as caught:
        write_report([tmp_path / "nowhere", tmp_path])
    assert "nowhere: no such folder" in str(caught.value)
    assert "holds no run (no metrics.jsonl" in str(caught.value)


def test_the_tool(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert tool("report").main([str(run)]) == 0
    assert (run / "report.html").exists() and "charts" in capsys.readouterr().out
    assert tool("report").main([str(run), "--output", str(tmp_path / "there.html")]) == 0
    assert (tmp_path / "there.html").exists()
    capsys.readouterr()
    assert tool("report").main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("error: ") == 1
    assert tool("report").main([str(run), "--output", str(tmp_path / "no" / "there.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_at_the_runs_end_a_failure_is_a_warning(tmp_path, caplog, monkeypatch):
    run = write_run(tmp_path / "run")
    written = report_at_end(run)
    assert written is not None and written.path == run / "report.html"
    assert report_at_end(tmp_path / "nowhere") is None
    assert "report.html was not written" in caplog.text
    caplog.clear()
    (run / "report.html").unlink()
    (run / "report.html").mkdir()  # in the way
    assert report_at_end(run) is None and "was not written" in caplog.text
    assert not (run / ".report.html.partial").exists()
    caplog.clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert report_at_end(run) is None
    (record,) = caplog.records
    assert INSTALL in record.message and "\n" not in record.message
    assert record.levelname == "WARNING"
