"""The curves of several seeds: what they say of runs whose figures are known."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]


def write_run(folder: Path, *, accuracies: dict[int, float], parities: list[float]) -> Path:
    folder.mkdir()
    evaluations = [{"step": s, "evaluation/reward_mean": a} for s, a in accuracies.items()]
    metrics = [
        {"step": step, "parity/logprob_abs_diff_mean": parity, "reward/mean": step / 10}
        for step, parity in enumerate(parities, start=1)
    ]
    for name, rows in (("evaluations.jsonl", evaluations), ("metrics.jsonl", metrics)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run_tool(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/arithmetic_curves.py", *map(str, words)]
    environment = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_mean_and_spread_over_seeds(tmp_path: Path) -> None:
    first = write_run(
        tmp_path / "seed1", accuracies={0: 0.2, 2: 0.8, 4: 0.9}, parities=[0.03, 0.02, 0.01, 0.0]
    )
    stopped = write_run(tmp_path / "seed2", accuracies={0: 0.3, 2: 0.6}, parities=[0.01, 0.04])
    drawing = tmp_path / "curves.svg"
    done = run_tool(first, stopped, "--svg", drawing)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == (
        "seed1: 4 steps; held-out accuracy 0.200 after step 0, 0.900 after step 4; "
        "largest parity/logprob_abs_diff_mean 0.0300 in step 1"
    )
    assert "seed2: 2 steps" in lines[1] and "0.0400 in step 2" in lines[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[5:]]
    assert [row[0] for row in rows] == ["0", "2"]  # as far as both have come
    assert [row[1] for row in rows] == ["0.250 (0.200 to 0.300)", "0.700 (0.600 to 0.800)"]
    assert rows[0][2:] == [""] * 5  # before training there is an evaluation alone
    assert rows[1][2] == "0.200 (0.200 to 0.200)"
    assert rows[1][6] == "0.0300 (0.0200 to 0.0400)"
    root = ElementTree.parse(drawing).getroot()
    shapes = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert (shapes.count("polyline"), shapes.count("polygon")) == (3, 3)  # of what the runs have


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    done = run_tool(tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path}/metrics.jsonl: no such file" in done.stderr
