"""Which run is gone on with, what may change meanwhile, and what is cut from the run's files."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_megatron.checkpoint.training_manifest import TrainingManifest
from rlhf_megatron.config import Config
from rlhf_megatron.errors import UserError
from rlhf_megatron.resume import (
    ResumePoint,
    _changes,
    _refused,
    choose_checkpoint,
    cut_back,
    flat,
    plain_config,
)
from rlhf_megatron.stopping import TimeLimit, slurm_time_limit
from rlhf_megatron.validation import goes_on_in, validate_paths

RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@pytest.fixture(autouse=True)
def first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RESTARTS, "SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)


def make_run(folder: Path, *, steps: int, marker: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"step": s}) + "\n" for s in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "checkpoints" / "step_000002").mkdir(parents=True)
    if marker:
        (folder / "checkpoints" / "latest").write_text(marker)
    return folder


def config_of(folder: Path, *, resume: str = "auto") -> Config:
    config = Config()
    config.run.output_dir = str(folder)
    config.checkpoint.resume = resume
    return config


def test_a_run_with_a_checkpoint_goes_on_without_overwrite(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3, marker="step_000002")
    assert validate_paths(config_of(run)) == []
    assert choose_checkpoint(config_of(run)) == run / "checkpoints/step_000002"
    problem = validate_paths(config_of(run, resume="never"))
    assert len(problem) == 1 and "already holds a run; give another folder" in problem[0]
    assert choose_checkpoint(config_of(run, resume="never")) is None


def test_a_run_without_a_checkpoint_is_protected_but_from_its_own_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", steps=3)
    assert "it has no checkpoint to go on from" in validate_paths(config_of(run))[0]
    assert choose_checkpoint(config_of(run)) is None
    for name in RESTARTS:
        monkeypatch.setenv(name, "1")
        assert validate_paths(config_of(run)) == []
        monkeypatch.setenv(name, "0")
    assert validate_paths(config_of(run)) != []


def test_a_path_names_a_checkpoint_or_a_folder_with_a_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_run(tmp_path / "other", steps=3, marker="step_000002")
    own = tmp_path / "own"
    step = other / "checkpoints/step_000002"
    for path in (other, other / "checkpoints", step):
        config = config_of(own, resume=str(path))
        assert validate_paths(config) == []
        assert choose_checkpoint(config) == step
        assert not goes_on_in(own, resume=str(path))
        assert goes_on_in(other, resume=str(path)) == (path != other)
    with pytest.raises(UserError, match="no checkpoint; give a folder such as"):
        choose_checkpoint(config_of(own, resume=str(tmp_path)))
    assert "no such folder" in validate_paths(config_of(own, resume="/nowhere"))[0]
    # A restart goes on with what the run has written since.
    make_run(own, steps=2, marker="step_000002")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    chosen = choose_checkpoint(config_of(own, resume=str(step)))
    assert chosen == own / "checkpoints/step_000002"
    assert goes_on_in(own, resume=str(step))


def test_what_may_change_is_noted_and_what_may_not_is_refused() -> None:
    written = plain_config(Config())
    config = Config()
    config.run.name, config.run.output_dir, config.run.steps = "other", "elsewhere", 7
    config.checkpoint.keep_last = 9
    config.actor.parallel.tensor_model_parallel_size = 4
    config.actor.optimizer.learning_rate = 0.5
    assert list(_changes(written, config=config)) == [
        "actor.optimizer.learning_rate changed since: "
        f"{flat(written)['actor.optimizer.learning_rate']} -> 0.5",
        "run.steps changed since: 100 -> 7",
    ]
    assert list(_refused(written, config=config)) == []
    config.actor.precision, config.run.seed = "fp32", 5
    assert list(_refused(written, config=config)) == [
        "actor.precision: bf16 -> fp32",
        "run.seed: 1 -> 5",
    ]


def test_flat_names_every_leaf() -> None:
    assert flat({"a": {"b": 1, "c": {"d": [2]}}, "e": {}}) == {"a.b": 1, "a.c.d": [2], "e": {}}


def test_the_files_are_cut_back_to_the_step_and_half_lines_go(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4, marker="step_000003")
    for number in (2, 3):
        (run / f"checkpoints/step_{number:06d}").mkdir(exist_ok=True)
    (run / "checkpoints/step_000004.tmp-abcdef").mkdir()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    ledger = [{"step": 0}, {"step": 2}, {"step": 2}, {"step": 3}]
    (run / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ledger))
    (run / "rollouts").mkdir()
    for name in ("step_000002.jsonl", "step_000003.jsonl", "step_000003.jsonl.partial"):
        (run / "rollouts" / name).write_text("")
    folder = run / "checkpoints/step_000002"
    manifest = TrainingManifest(
        step=2, run_id="r", written_at="", world_size=1, layouts={}, versions={}
    )
    point = ResumePoint(
        folder=folder, manifest=manifest, state={}, in_place=True, same_layout=True, notes=()
    )
    cut_back(point, output_dir=run)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()]
    assert steps == [1, 2]
    assert [json.loads(line)["step"] for line in (run / "ledger.jsonl").open()] == [0, 2, 2]
    assert [path.name for path in (run / "rollouts").iterdir()] == ["step_000002.jsonl"]
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["latest", "step_000002"]
    assert (run / "checkpoints/latest").read_text() == "step_000002\n"


def test_a_time_limit_is_a_reason_only_when_it_is_near() -> None:
    assert TimeLimit(time.time() + 3600, 600).reason == ""
    assert TimeLimit(time.time() + 599, 600).reason.startswith("the job's time limit, 10.0 minutes")
    assert TimeLimit(time.time() - 5, 600).reason == "the job's time limit, 0.0 minutes away"


def test_the_time_limit_comes_from_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm_time_limit(stop_before_minutes=5) is None  # no job
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000000000")
    assert slurm_time_limit(stop_before_minutes=0) is None  # not asked for
    assert slurm_time_limit(stop_before_minutes=5) == TimeLimit(2e9, 300)
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    script = tmp_path / "scontrol"
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(2e9))
    for text, limit in ((f"EndTime={end} Deadline=N/A", TimeLimit(2e9, 60)), ("EndTime=?", None)):
        script.write_text(f"#!/bin/sh\necho 'JobId=12 {text}'\n")
        script.chmod(0o755)
        assert slurm_time_limit(stop_before_minutes=1) == limit


TWO_SIGNALS = """
import os, signal, sys, time
from rlhf_megatron import stopping
stopping.SAME_SIGNAL_SECONDS = 0.3
signals = stopping.StopSignals()
assert signals.reason == ""
for pause in map(float, sys.argv[1:]):
    time.sleep(pause)
    os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.3)
print(signals.reason)
signals.close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


@pytest.mark.parametrize(
    ("pauses", "code", "said"),
    [
        (["0"], 0, "SIGUSR1\n"),
        (["0", "0.05"], 0, "SIGUSR1\n"),  # passed on twice
        (["0", "0.6"], 1, ""),
    ],
)
def test_the_first_signal_asks_and_a_second_one_ends(
    pauses: list[str], code: int, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_SIGNALS, *pauses], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (code, said), done.stderr
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


TAKEN_OVER = """
import ctypes, os, signal, sys, time
from rlhf_megatron import stopping
signals = stopping.StopSignals()
if sys.argv[1] == "python":
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
else:  # as native code does, which Python does not see
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(int(signal.SIGTERM), None)
if sys.argv[2] == "held":
    signals.hold()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.3)
print(signals.reason)
"""


@pytest.mark.parametrize("where", ["python", "native"])
def test_a_signal_that_a_library_has_taken_over_is_taken_back(where: str) -> None:
    def result(held: str) -> tuple[int, str]:
        command = [sys.executable, "-c", TAKEN_OVER, where, held]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout

    assert result("held") == (0, "SIGTERM\n")
    assert result("lost") == (-signal.SIGTERM, "")
