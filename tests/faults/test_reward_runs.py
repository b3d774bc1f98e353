"""Rewards outside the ranks: workers that hang and die, servers that are killed during a run."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from tiny_run import Job, Trigger, metrics, run_to_the_end, settings

from rlhf_megatron.errors import UserError
from rlhf_megatron.rewards.config import RemoteRewardConfig
from rlhf_megatron.rewards.contract import ScoringInput
from rlhf_megatron.rewards.pool import WorkerPool
from rlhf_megatron.rewards.remote import RemoteScorer
from rlhf_megatron.rewards.score import score_batch

ROOT = Path(__file__).parents[2]
FUNCTION = """
import ctypes, os, subprocess, sys, time

def score(prompt, response, **fields):
    if response == "exit":
        print("about to leave")
        os._exit(7)
    if response == "crash":
        ctypes.string_at(0)
    if response == "hang":
        subprocess.Popen(["sleep", "60"])
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
    if response == "raise":
        raise ValueError("no\\nletters")
    if response == "where":
        return os.getpid()
    if response == "environment":
        return sum(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    if response.startswith("wait "):
        while not os.path.exists(response[5:]):
            time.sleep(0.01)
    if response.startswith("touch "):
        open(response[6:], "w").close()
    if response == "torch":
        return "torch" in sys.modules
    return len(response) + fields.get("k", 0)
"""


@pytest.fixture
def function(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(FUNCTION)
    return f"{tmp_path}/rewards.py:score"


@contextmanager
def pool_of(function: str, **options: Any) -> Iterator[WorkerPool]:
    pool = WorkerPool(function, **({"workers": 2} | options))
    try:
        yield pool
    finally:
        pool.close()


def samples(*responses: str, **fields: Any) -> list[ScoringInput]:
    return [
        ScoringInput(prompt="p", response=r, prompt_id=i, sample_index=0, fields=fields)
        for i, r in enumerate(responses)
    ]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_workers_that_hang_or_die_cost_one_sample_each(function: str, tmp_path: Path) -> None:
    responses = ("a", "exit", "bb", "crash", "hang", "ccc", "raise", "dddd")
    with pool_of(function, timeout_seconds=1.0, log_folder=tmp_path, name="rank_0000") as pool:
        first = pool.pids
        began = time.monotonic()
        scores = score_batch(samples(*responses, k=1), scorer=pool, on_error="drop")
        seconds = time.monotonic() - began
        counts = pool.take_counts()
        again = pool(samples("a", "a"))
    assert [r for r in scores.rewards.tolist() if not math.isnan(r)] == [2.0, 3.0, 4.0, 5.0]
    exit_, crash, hang, raised = (failure.reason for failure in scores.failed)
    assert exit_.startswith("its worker left with exit code 7; it printed: about to leave (")
    assert "reward_rank_0000_" in exit_
    assert crash.startswith("its worker died of SIGSEGV; it printed: Fatal Python error")
    assert "rewards.py" in crash  # the stack of the function
    assert hang.startswith("took longer than reward.timeout_seconds=1, its worker was killed")
    assert raised.startswith("raised ValueError: no letters (") and "rewards.py:" in raised
    assert counts == {"reward/workers_replaced": 3.0} and again == [1.0, 1.0]
    assert 1.0 <= seconds < 30.0
    assert not any(is_running(pid) for pid in first)


def test_samples_may_come_one_by_one(function: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with pool_of(function) as pool:
        pending = pool.begin()
        for sample in samples(f"wait {gate}", "a", "bb"):
            pending.add(sample)
        wait_until(lambda: pending.num_scored == 2)
        gate.touch()
        wait_until(lambda: pending.num_scored == 3)
        pending.add(samples("raise")[0])
        pending.all_added()
        first, *others, last = pending.result()
    assert (first, others, pending.num_scored) == (5 + len(str(gate)), [1, 2], 4)
    assert "no letters" in str(last)


def test_scores_that_are_given_up_are_not_begun(function: str, tmp_path: Path) -> None:
    gate, note = tmp_path / "gate", tmp_path / "note"
    with pool_of(function, workers=1) as pool:
        given_up = pool.start(samples("a", f"wait {gate}", f"touch {note}"))
        wait_until(lambda: given_up.num_scored == 1)
        given_up.cancel()
        wanted = pool.start(samples("bb"))
        gate.touch()
        assert wanted.result() == [2]
        assert not note.exists() and pool.take_counts() == {"reward/workers_replaced": 0.0}


def wait_until(happened: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20.0
    while not happened():
        assert time.monotonic() < ends, "it did not happen within 20 s"
        time.sleep(0.005)


def test_a_worker_is_no_rank_and_has_nothing_of_it(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    with pool_of(function, workers=1, fields=["k"]) as pool:
        pid, variables, has_torch = pool(samples("where", "environment", "torch"))
        assert [pid] == pool.pids and pid != os.getpid()
        assert (variables, has_torch) == (0.0, 0.0)
        os.kill(int(pid), signal.SIGTERM)  # as to the whole job: the rank decides when it ends
        assert pool(samples("where")) == [pid]
    assert not is_running(int(pid))


def test_what_a_worker_cannot_load_is_told_at_the_start(tmp_path: Path, function: str) -> None:
    with pytest.raises(UserError, match="has no 'other'; its functions: score"):
        WorkerPool(f"{tmp_path}/rewards.py:other", workers=2)
    (tmp_path / "dies.py").write_text("import os\nprint('bye')\nos._exit(5)\n")
    with pytest.raises(UserError, match=r"left with exit code 5 while it loaded it; .*bye"):
        WorkerPool(f"{tmp_path}/dies.py:score", workers=1, log_folder=tmp_path)
    (tmp_path / "strict.py").write_text("def score(prompt, response):\n    return 0\n")
    with pytest.raises(UserError, match="unexpected keyword argument 'k'"):
        WorkerPool(f"{tmp_path}/strict.py:score", workers=1, fields=["k"])


def test_workers_end_with_a_rank_that_is_killed(function: str) -> None:
    program = (
        "import sys, time\n"
        "from rlhf_megatron.rewards.pool import WorkerPool\n"
        "from rlhf_megatron.rewards.contract import ScoringInput\n"
        f"pool = WorkerPool({function!r}, workers=2)\n"
        "print(*pool.pids, flush=True)\n"
        "s = ScoringInput(prompt='', response='hang', prompt_id=0, sample_index=0)\n"
        "pool([s, s])\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    pids = [int(word) for word in rank.stdout.readline().split()]
    assert len(pids) == 2 and all(is_running(pid) for pid in pids)
    rank.kill()
    rank.wait()
    ends = time.monotonic() + 10.0
    while any(is_running(pid) for pid in pids) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


# The server of tools/reward_server.py.


class Server:
    """The tool in a process of its own."""

    def __init__(self, function: str, *, port: int = 0, token: str = "", **options: Any) -> None:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "tools/reward_server.py", "--function", function),
                *("--port", str(port), "--workers", "2", *words),
            ],
            cwd=ROOT,
            env=os.environ | {"REWARD_SERVER_TOKEN": token},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(f"serving {function} at http://"), line
        self.url = line.split()[-1]
        self.port = int(self.url.rpartition(":")[2])

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        try:
            with urlopen(Request(self.url + path, data=body, headers=headers), timeout=20) as found:
                return found.status, json.load(found)
        except HTTPError as error:
            return error.code, json.load(error)


def test_the_reference_server(function: str) -> None:
    with Server(function, token="abc", timeout_seconds=1) as server:
        bearer = {"Authorization": "Bearer abc"}
        sample = {"prompt": "p", "prompt_id": 0, "sample_index": 0, "fields": {"k": 2}}
        texts = ["aaa", "raise", "hang", "where"]
        body = {
            "version": 1,
            "request_id": "r1",
            "samples": [sample | {"response": t} for t in texts],
        }
        status, found = server.ask("/score", json.dumps(body).encode(), **bearer)
        assert (status, found["request_id"]) == (200, "r1")
        good, raised, late, where = found["results"]
        assert good == {"score": 5.0} and raised["error"].startswith(
            "raised ValueError: no letters"
        )
        assert late["error"].startswith("took longer than reward.timeout_seconds=1")
        # The same request again is not scored again: the same process has scored it.
        began = time.monotonic()
        assert server.ask("/score", json.dumps(body).encode(), **bearer)[1] == found
        assert time.monotonic() - began < 1.0 and where["score"] > 0
        status, health = server.ask("/health")
        assert (status, health["status"], health["samples"]) == (200, "ok", 4)
        assert server.ask("/health", Authorization="Bearer abd")[0] == 401
        assert server.ask("/score", b"{}", Authorization="Bearer abd")[0] == 401
        assert server.ask("/score", b"{}")[0] == 401
        assert server.ask("/other", b"{}", **bearer)[0] == 404
        for wrong, reason in (
            (b"{", "not JSON"),
            (json.dumps(body | {"version": 2}).encode(), "version 2, this server speaks 1"),
            (json.dumps(body | {"samples": [{}]}).encode(), "samples[0].prompt must be a text"),
        ):
            status, found = server.ask("/score", wrong, **bearer)
            assert status == 400 and reason in found["error"]


def test_the_server_stops_when_what_is_under_way_is_answered(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\ndef score(prompt, response):\n    time.sleep(1.0)\n    return 3\n"
    )
    with Server(f"{tmp_path}/slow.py:score") as server:
        config = RemoteRewardConfig(endpoints=[server.url], retries=0, batch_samples=1)
        pending = RemoteScorer(config).start(samples("a", "b"))
        time.sleep(0.5)
        server.process.terminate()
        assert pending.result() == [3.0, 3.0]
        assert server.process.wait(timeout=20) == 0
        assert server.process.stdout is not None and server.process.stdout.read() == "stopped\n"


# Whole runs.


@dataclass(frozen=True, kw_only=True)
class KillServer(Trigger):
    """SIGKILL to the reward server as a rank enters a phase."""

    pid: int

    def phase_entered(self, *, step: int, phase: str) -> None:
        if (step, phase) == (self.step, self.phase):
            os.kill(self.pid, signal.SIGKILL)


def two_ranks(files: Path, folder: Path, **changes: Any) -> list[str]:
    """TP2 on 2 ranks, 3 steps."""
    plain: dict[str, Any] = {
        f"{role}__parallel__pipeline_model_parallel_size": 1 for role in ("actor", "critic", "ref")
    }
    plain |= {"engine": "hf", "warmup__steps": 0, "run__steps": 3, "evaluation__prompts": ""}
    plain |= {"ppo__epochs": 1}
    return settings(files, output=folder / "run", **(plain | changes))


def remote(server: Server, **changes: Any) -> dict[str, Any]:
    return {
        "reward__function": "",
        "reward__remote__endpoints": f"[{server.url}]",
        "reward__remote__batch_samples": 2,
        "reward__remote__retries": 1,
        "reward__remote__backoff_seconds": 0.05,
        **changes,
    }


def learning(run: Path) -> list[dict[str, Any]]:
    """The metrics that do not depend on who scores."""
    others = ("reward/remote_", "reward/workers_replaced", "reward/scored_in_rollout")
    return [
        {name: value for name, value in line.items() if not name.startswith(others)}
        for line in metrics(run)
    ]


@pytest.fixture(scope="module")
def in_the_ranks(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose ranks score by themselves."""
    folder = tmp_path_factory.mktemp("in_the_ranks")
    run_to_the_end(two_ranks(files, folder), logs=folder / "logs", world_size=2)
    return folder / "run"


def test_a_run_with_workers_is_the_run_without(
    files: Path, in_the_ranks: Path, tmp_path: Path
) -> None:
    words = two_ranks(files, tmp_path, reward__workers=1, reward__timeout_seconds=20)
    run_to_the_end(words, logs=tmp_path / "logs", world_size=2)
    lines = metrics(tmp_path / "run")
    assert [line["reward/workers_replaced"] for line in lines] == [0.0] * 3
    assert all(0 <= line["reward/scored_in_rollout"] <= 12 for line in lines)
    assert learning(tmp_path / "run") == metrics(in_the_ranks)
    assert (tmp_path / "run/logs/reward_rank_0001_00.log").exists()


def test_a_killed_server_under_stop_saves_and_the_run_can_be_gone_on_with(
    files: Path, in_the_ranks: Path, tmp_path: Path
) -> None:
    changes = {"checkpoint__interval_steps": 0}
    function = f"{files}/rewards.py:score"
    with Server(function) as server:
        words = two_ranks(files, tmp_path, **remote(server, **changes))
        kill = KillServer(phase="rollout", step=2, pid=server.process.pid)
        job = Job(words, logs=tmp_path / "first", world_size=2, trigger=kill)
        assert job.wait() == [3, 3], job.text()
        text = " ".join(job.text().split())
        assert text.count("stopped by reward servers that gave no score of 12 responses") == 1
        assert f"prompt 6, sample 0: {server.url}: Connection refused (try 2 of 2)" in text or (
            f"{server.url}: " in text and "(try 2 of 2)" in text
        )
        assert (tmp_path / "run/checkpoints/latest").read_text() == "step_000001\n"
        # A start waits so long for a server that is well.
        impatient = [*words, "reward.remote.timeout_seconds=1"]
        refused = Job(impatient, logs=tmp_path / "too_early", world_size=2)
        assert refused.wait() == [2, 2] and "none is well" in refused.text()
        with Server(function, port=server.port):
            run_to_the_end(words, logs=tmp_path / "second", world_size=2)
    assert learning(tmp_path / "run") == metrics(in_the_ranks)


def test_a_killed_server_under_value_gives_the_value_and_the_run_ends_well(
    files: Path, in_the_ranks: Path, tmp_path: Path
) -> None:
    with Server(f"{files}/rewards.py:score") as server:
        changes = {"reward__on_error": "value", "reward__error_value": 0.25}
        words = two_ranks(files, tmp_path, **remote(server, **changes))
        kill = KillServer(phase="rollout", step=2, pid=server.process.pid)
        run_to_the_end(words, logs=tmp_path / "logs", world_size=2, trigger=kill)
    first, *others = learning(tmp_path / "run")
    assert first == metrics(in_the_ranks)[0]
    for line in others:
        assert (line["reward/mean"], line["reward/std"]) == (0.25, 0.0)
        assert line["faults/reward_failures"] == 12.0 and line["reward/dropped"] == 0.0


def test_a_killed_server_under_drop_leaves_nothing_and_the_run_stops(
    files: Path, tmp_path: Path
) -> None:
    with Server(f"{files}/rewards.py:score") as server:
        changes = {"reward__on_error": "drop", "checkpoint__asynchronous": False}
        words = two_ranks(files, tmp_path, **remote(server, **changes))
        kill = KillServer(phase="rollout", step=2, pid=server.process.pid)
        job = Job(words, logs=tmp_path / "logs", world_size=2, trigger=kill)
        assert job.wait() == [2, 2], job.text()
    assert "none of the step's 12 samples could be scored; the first: prompt" in job.text()
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step_000001\n"
