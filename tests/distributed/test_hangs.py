"""A rank that hangs, stands still or holds the interpreter is named by the others."""

import ctypes
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import run_side_by_side
from test_failure import _host_a_store

from rlhf_megatron.distributed.failure import FailureChannel
from rlhf_megatron.distributed.heartbeat import Position

WORLD_SIZE = 3
LIMIT_SECONDS = 12.0
"""Long enough for all to come to their places: 27 processes start at once."""
WITHIN_SECONDS = 60.0
"""From the start of the processes, on a busy machine."""


def work_for_ever(rank: int, victim: int, kind: str, is_host: bool) -> None:
    """All-reduces, until the victim takes no part any more."""
    if is_host:
        _host_a_store(rank)
    channel = FailureChannel(rank=rank, world_size=WORLD_SIZE)
    channel.position = lambda: Position("value of step 4", 9, LIMIT_SECONDS, "faults.some_key")
    channel.start()
    dist.barrier()
    time.sleep(1.5)
    if rank == victim and kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == victim and kind == "hang":
        time.sleep(3600)
    if rank == victim and kind == "gil":
        ctypes.PyDLL(None).sleep(3600)  # a call that keeps all threads of Python from running
    dist.all_reduce(torch.ones(1))
    time.sleep(3600)


CASES = [
    (0, "stop", False),
    (0, "stop", True),
    (1, "stop", False),
    (2, "stop", True),
    (0, "hang", True),
    (1, "hang", False),
    (0, "gil", True),
    (2, "gil", False),
]


def wait_in_vain(rank: int) -> None:
    """Rank 1 does not come to a collective that gives up before any limit is reached."""
    channel = FailureChannel(rank=rank, world_size=WORLD_SIZE)
    channel.position = lambda: Position("reshard of step 2", 3)
    channel.start()
    group = dist.new_group(timeout=timedelta(seconds=5))
    try:
        if rank == 1:
            time.sleep(3600)
        dist.all_reduce(torch.ones(1), group=group)
    except BaseException as error:
        channel.report(error)


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Of all cases, which run at once: they wait."""
    calls = {case: (work_for_ever, *case) for case in CASES} | {wait_in_vain: (wait_in_vain,)}
    return run_side_by_side(WORLD_SIZE, calls, folder=tmp_path_factory.mktemp("hangs"))


@pytest.mark.parametrize(("victim", "kind", "is_host"), CASES)
def test_the_rank_that_others_wait_for_is_named_once(ends, victim, kind, is_host):
    ends = ends[victim, kind, is_host]
    others = [rank for rank in range(WORLD_SIZE) if rank != victim]
    assert [ends[rank].exit_code for rank in others] == [1, 1]
    assert ends[victim].exit_code == (1 if kind == "hang" else -signal.SIGKILL)
    assert max(end.seconds for end in ends) < WITHIN_SECONDS
    said = "".join(end.stderr for end in ends)
    cause = {
        "stop": "stopped responding in value of step 4: its process is stopped (as by SIGSTOP)",
        "hang": "hangs in value of step 4: for ",
        "gil": "stopped responding in value of step 4: its process runs, but its threads do not",
    }[kind]
    assert said.count(f"error: rank {victim} {cause}") == 1, said
    assert said.count("error: ") == 1, said
    assert "the limit is 12 s (faults.some_key)" in said
    if kind == "hang":
        assert "waits in all_reduce" in said and "test_hangs.py" in said


def test_the_first_message_is_the_cause_and_not_a_timeout(ends):
    ends = ends[wait_in_vain]
    assert [end.exit_code for end in ends] == [1, 1, 1]
    said = "".join(end.stderr for end in ends)
    assert said.count("error: rank 1 hangs in reshard of step 2: for ") == 1, said
    assert said.count("error: ") == 1, said
    assert "a collective timed out" in said.split("\n")[0] and "time.sleep(3600)" in said
