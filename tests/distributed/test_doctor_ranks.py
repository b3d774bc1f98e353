"""The examination over real ranks: all come to one report; the network is measured."""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks, run_until_exit

from rlhf_megatron.config import load_config
from rlhf_megatron.distributed.failure import FailureChannel
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.doctor import gather_files
from rlhf_megatron.doctor.at_start import check_machines
from rlhf_megatron.doctor.bandwidth import measure_bandwidths, scopes_of
from rlhf_megatron.doctor.examine import examine_job
from rlhf_megatron.doctor.facts import Needs
from rlhf_megatron.doctor.report import Report
from rlhf_megatron.doctor.watch import Watch
from rlhf_megatron.errors import UserError
from rlhf_megatron.launcher import free_port

ROOT = Path(__file__).parents[2]


def context_of(rank: int, *, ranks_per_node: int) -> DistributedContext:
    """As on nodes of so many ranks, which are all this machine."""
    return DistributedContext(
        rank=rank,
        world_size=dist.get_world_size(),
        local_rank=rank % ranks_per_node,
        local_world_size=ranks_per_node,
        device=torch.device("cpu"),
        backend="gloo",
        timeout_seconds=60.0,
        job_group=dist.group.WORLD,
    )


def examined(rank: int, folder: Path, unseen: str) -> Report:
    """The quick form; the second node does not see the file `unseen`."""
    if rank >= 2 and unseen:
        real = gather_files._readable_files

        def without(path: Path) -> list[Path]:
            if path.name == unseen:
                raise FileNotFoundError(f"no such file: {path}")
            return real(path)

        gather_files._readable_files = without
    config = load_config([str(folder / "config.yaml")])
    return examine_job(
        context_of(rank, ranks_per_node=2),
        config=config,
        needs=Needs(config=config.doctor, uses_vllm=False),
        full=False,
        watch=Watch(timeout_seconds=60.0),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "2+3="}\n')
    (tmp_path / "config.yaml").write_text(
        f"run: {{output_dir: {tmp_path}/run}}\n"
        f"data: {{prompts: {tmp_path}/prompts.jsonl}}\n"
        "distributed: {device: cpu}\n"
    )
    return tmp_path


def test_all_ranks_come_to_the_same_report(folder: Path) -> None:
    reports = run_ranks(4, examined, folder, "")
    assert len({report.table() for report in reports}) == 1
    found = {finding.check: finding for finding in reports[0].findings}
    assert reports[0].is_go, reports[0].table()
    assert "4 ranks on 2 nodes" in reports[0].subject
    assert "data.prompts readable on all 2 nodes" in found["input files"].found
    assert "shared by all 2 nodes" in found["run.output_dir"].found
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "prompts.jsonl"]


def test_what_one_node_does_not_see_stops_all(folder: Path) -> None:
    reports = run_ranks(4, examined, folder, "prompts.jsonl")
    assert len({report.table() for report in reports}) == 1
    assert not reports[0].is_go
    worst = reports[0].findings[0]
    assert worst.check == "data.prompts" and "no such file" in worst.found


def measured(rank: int) -> list[tuple[str, str, dict[str, float]]]:
    found = measure_bandwidths(
        context_of(rank, ranks_per_node=2),
        scopes=scopes_of(hostnames=["a", "b"], ranks_per_node=2),
        timeout_seconds=60.0,
        watch=Watch(timeout_seconds=60.0),
    )
    return [(m.collective, m.scope, dict(m.bytes_per_second)) for m in found]


def test_bandwidths_of_all_groups_are_known_to_all() -> None:
    answers = run_ranks(4, measured)
    assert all(answer == answers[0] for answer in answers)
    assert [(collective, scope) for collective, scope, _ in answers[0]] == [
        ("all-reduce", "node"),
        ("all-gather", "node"),
        ("all-reduce", "cross-node"),
        ("all-gather", "cross-node"),
    ]
    assert all(rate > 1e6 for _, _, rates in answers[0] for rate in rates.values())
    assert set(answers[0][0][2]) == {"a", "b"}
    assert set(answers[0][2][2]) == {"local rank 0", "local rank 1"}


def starts(rank: int, folder: Path, stuck: bool) -> None:
    """A job's start; rank 1's disk may be full, or may not answer."""
    config = load_config([str(folder / "config.yaml")], overrides=["doctor.timeout_seconds=3"])
    channel = FailureChannel(rank=rank, world_size=2)
    channel.start()
    if stuck and rank == 0:
        gather_files._readable_files = lambda path: time.sleep(600)
    elif rank == 0:
        gather_files.write_problem = lambda folder: f"{folder}: cannot be written to"
    try:
        context = context_of(rank, ranks_per_node=2)
        check_machines(config, architectures=None, context=context, channel=channel)
    except UserError as error:
        channel.report(error)


def test_a_red_line_at_the_start_ends_the_job_with_exit_code_2(folder: Path) -> None:
    ends = run_until_exit(2, starts, folder, False, folder=folder)
    assert [end.exit_code for end in ends] == [2, 2]
    assert "no-go: 1 red" in ends[0].stderr and "run.output_dir" in ends[0].stderr
    assert "-> give run.output_dir a folder" in ends[0].stderr
    assert "doctor.at_start=false" in ends[0].stderr
    assert ends[1].stderr == ""


def test_a_file_system_that_does_not_answer_is_named(folder: Path) -> None:
    ends = run_until_exit(2, starts, folder, True, folder=folder)
    assert [end.exit_code for end in ends] == [1, 1]
    assert "rank 0" in ends[0].stderr and "doctor.timeout_seconds" in ends[0].stderr
    assert "preflight: facts of ranks and nodes" in ends[0].stderr
    assert max(end.seconds for end in ends) < 60


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "doctor.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def test_the_command_over_two_ranks() -> None:
    ended = doctor("--nproc-per-node", "2", "--quick", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["go"] is True and found["subject"].startswith("2 ranks on 1 node")
    assert {"python", "torch", "megatron-core"} <= {f["check"] for f in found["findings"]}


def test_a_rank_that_stays_away_is_named(tmp_path: Path) -> None:
    """Rank 0 of two, and no rank 1: no hang, its name, and no-go."""
    config = tmp_path / "config.yaml"
    config.write_text(
        "run: {output_dir: runs/x}\nactor: {model: none}\ndata: {prompts: none.jsonl}\n"
        'reward: {function: "rewards.py:score"}\ndistributed: {device: cpu}\n'
    )
    ended = doctor(
        *("--quick", "--config", str(config), "doctor.timeout_seconds=1"),
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    assert ended.returncode == 1, ended.stderr
    assert "rank 1 of 2 (node 1): not come within 1 s" in ended.stderr
    assert "no-go" in ended.stdout


def test_bad_usage_is_no_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process: the others start the command."""
    main = runpy.run_path(str(ROOT / "tools" / "doctor.py"))["main"]
    for arguments in (
        ("--config", "/no/such.yaml"),
        ("run.steps=1",),
        ("--config", str(folder / "config.yaml"), "run.stepz=1"),
    ):
        code, said = main(arguments), capsys.readouterr()
        assert code == 2, said.err
        assert said.err.startswith("error: ") and said.out == ""
