"""Every bad configuration ends the command with exit code 2 and one message, and nothing starts.

`main` is the function behind launch/train.py; a few go through the real command.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bad_configs import BAD, BAD_FOR_MODEL, GOOD, MODEL

from rlhf_megatron.main import main

ROOT = Path(__file__).parents[2]
TABLE = [*BAD, *BAD_FOR_MODEL]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with everything that GOOD names, seen from rank 0 of 4."""
    for name in ("models/tiny", "m", "empty", "used"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("models/tiny", "m"):
        (tmp_path / name / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    for name in ("rewards.py", "a.py"):
        (tmp_path / name).write_text("def score(**_): return 0.0\n")
    (tmp_path / "used/metrics.jsonl").write_text("{}\n")
    (tmp_path / "good.yaml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    return tmp_path


def test_the_table_is_long_and_its_ground_is_sound(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(TABLE) >= 100
    assert main(["--config", "good.yaml", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "not here" not in captured.out


@pytest.mark.parametrize(("overrides", "parts"), TABLE, ids=lambda value: value[0])
def test_exit_code_and_message(
    folder: Path, overrides: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", "good.yaml", *overrides]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()  # one problem, and nothing that follows from it
    assert line.startswith("error: ")
    for part in parts:
        assert part in line, line
    assert "Traceback" not in line
    assert not (folder / "runs").exists()


def test_five_faults_are_five_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = GOOD + "rollout:\n  temprature: 1\n  top_p: 0.9\nppo: {epochs: 0, gamma: much}\n"
    (folder / "bad.yaml").write_text(text)
    assert main(["--config", "bad.yaml", "data.prompts=none"]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "error: configuration: 5 problems"
    for line, part in zip(
        sorted(lines),
        ("data.prompts=none", "ppo.epochs=0", "ppo.gamma=much", "temprature", "top_p=0.9"),
        strict=True,
    ):
        assert line.startswith("  - ")
        assert part in line


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["the following arguments are required: --config"]),
        (["--config", "none.yaml"], ["none.yaml: no such file; give the path of a YAML file"]),
        (["--config", "good.yaml", "--dry-run", "--world-size", "0"], ["--world-size 0: must be"]),
        (["--config", "good.yaml", "--dryrun"], ["unrecognized arguments: --dryrun; keys are"]),
        (
            ["--config", "good.yaml", "--n-samples-per-prompt", "4"],
            ["key.path=value; --n-samples-per-prompt: did you mean rollout.responses_per_prompt?"],
        ),
        (["--config", "good.yaml", "n_samples_per_prompt=4"], ["rollout.responses_per_prompt"]),
    ],
)
def test_bad_usage(
    folder: Path, words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    for part in parts:
        assert part in error


@pytest.mark.parametrize("dry_run", [True, False])
def test_the_real_command(folder: Path, dry_run: bool) -> None:
    words = ["--config", "good.yaml", "ppo.epochs=0", "rollout.top_k=5"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch/train.py"), *words, *(["--dry-run"] * dry_run)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: configuration: 2 problems",
        "  - ppo.epochs=0: must be at least 1; the default is 1 (command line)",
        "  - rollout.top_k=5: a cut tail makes the sampled distribution differ from the trained "
        "one; set -1 (off)",
    ]


def test_the_other_ranks_say_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr("rlhf_megatron.ranks.OTHERS_WAIT_SECONDS", 0.0)
    assert main(["--config", "good.yaml", "ppo.epochs=0"]) == 2
    assert capsys.readouterr().err == ""
