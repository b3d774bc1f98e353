"""Ranks whose interpreter a call outside Python keeps locked, while none is there to name them."""

import ctypes
import os
import signal
import time

import pytest
import torch.distributed as dist
from pool import run_side_by_side
from test_failure import _host_a_store

from rlhf_megatron.distributed.failure import FailureChannel
from rlhf_megatron.distributed.heartbeat import Position
from rlhf_megatron.distributed.stand_in import HELD_SECONDS

LIMIT_SECONDS = 20.0
WITHIN_SECONDS = 75.0
"""From the start of the processes, on a busy machine."""
PLACE = "update_actor of step 3"


def hold(seconds: int) -> None:
    """As a driver does: no thread of Python runs in the meantime, and no signal ends it."""
    mutex = ctypes.create_string_buffer(64)  # all zero: PTHREAD_MUTEX_INITIALIZER
    until = (ctypes.c_long * 2)(int(time.time()) + seconds, 0)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, until)


def start(rank: int, world_size: int, folder: str, limit_seconds: float = 600.0) -> FailureChannel:
    channel = FailureChannel(rank=rank, world_size=world_size)
    channel.position = lambda: Position(PLACE, 9, limit_seconds, "faults.some_key")
    channel.write_stacks_into(open(f"{folder}/stacks_{rank}.txt", "w"))  # noqa: SIM115
    channel.start()
    dist.barrier()
    time.sleep(2.5)  # all have read of each other
    return channel


def one_dies(rank: int, victim: int, is_host: bool, folder: str) -> None:
    """The other one is held up by then, for ever."""
    if is_host:
        _host_a_store(rank)
    start(rank, 2, folder)
    if rank == victim:
        time.sleep(2.0)
        os.kill(os.getpid(), signal.SIGKILL)
    hold(3600)


def all_are_held(rank: int, folder: str) -> None:
    start(rank, 2, folder, LIMIT_SECONDS)
    hold(3600)


def held_and_back(rank: int, folder: str) -> None:
    """Held up for long enough that another process watches; then all goes on, and ends well."""
    channel = start(rank, 2, folder)
    if rank == 0:
        hold(int(HELD_SECONDS) + 8)
    dist.barrier()
    channel.close()
    dist.barrier()
    os._exit(0)


def held_back_and_held(rank: int, folder: str) -> None:
    """The second time the other rank dies."""
    start(rank, 2, folder)
    if rank == 0:
        hold(int(HELD_SECONDS) + 8)
        time.sleep(3.0)
        dist.barrier()
        hold(3600)
    dist.barrier()
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS = [(1, False), (0, False), (0, True)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("held")


@pytest.fixture(scope="module")
def ends(folder):
    """Of all cases, which run at once: they wait."""
    calls = {case: (one_dies, *case) for case in DEATHS}
    calls |= {call: (call,) for call in (all_are_held, held_and_back, held_back_and_held)}
    folders = {case: folder / str(number) for number, case in enumerate(calls)}
    for path in folders.values():
        path.mkdir()
    with_folder = {case: (*call, str(folders[case])) for case, call in calls.items()}
    return run_side_by_side(2, with_folder, folder=folder)


@pytest.mark.parametrize(("victim", "is_host"), DEATHS)
def test_a_dead_rank_is_named_where_the_other_is_held_up(ends, victim, is_host, folder):
    ends_here, other = ends[victim, is_host], 1 - victim
    assert [ends_here[rank].exit_code for rank in (0, 1)] == [-signal.SIGKILL] * 2
    assert ends_here[other].seconds < WITHIN_SECONDS
    said = "".join(end.stderr for end in ends_here)
    assert said.count(f"error: rank {victim} died in {PLACE}: its process is gone") == 1, said
    assert said.count("error: ") == 1, said
    stacks = (folder / str(DEATHS.index((victim, is_host))) / f"stacks_{other}.txt").read_text()
    assert "in hold" in stacks and "in one_dies" in stacks


def test_ranks_that_are_all_held_up_are_named_at_the_limit(ends):
    ends = ends[all_are_held]
    assert [end.exit_code for end in ends] == [-signal.SIGKILL] * 2
    assert max(end.seconds for end in ends) < WITHIN_SECONDS
    said = "".join(end.stderr for end in ends)
    assert said.count(f"error: rank 0 (and 1 more ranks) stopped responding in {PLACE}: ") == 1
    assert said.count("error: ") == 1, said
    assert "its process runs, but its threads do not" in said
    assert "the limit is 20 s (faults.some_key)" in said


def test_a_rank_that_was_held_up_for_a_while_goes_on(ends):
    ends = ends[held_and_back]
    assert [end.exit_code for end in ends] == [0, 0]
    assert "".join(end.stderr for end in ends) == ""
    assert max(end.seconds for end in ends) > HELD_SECONDS


def test_it_is_watched_again_the_next_time(ends):
    ends = ends[held_back_and_held]
    assert [end.exit_code for end in ends] == [-signal.SIGKILL] * 2
    said = "".join(end.stderr for end in ends)
    assert said.count(f"error: rank 1 died in {PLACE}: its process is gone") == 1, said
    assert said.count("error: ") == 1, said


def alone(rank: int, folder: str) -> None:
    start(rank, 1, folder, LIMIT_SECONDS)
    hold(3600)


def test_a_rank_alone_is_named_at_the_limit(tmp_path):
    (end,) = run_side_by_side(1, {"alone": (alone, str(tmp_path))}, folder=tmp_path)["alone"]
    assert end.exit_code == -signal.SIGKILL
    assert end.stderr.count(f"error: rank 0 stopped responding in {PLACE}: its process runs") == 1
    assert end.stderr.count("error: ") == 1


def end_with_a_stand_in(rank: int) -> None:
    channel = FailureChannel(rank=rank, world_size=2)
    channel.start()
    dist.barrier()
    print(channel._stand_in._process.pid, flush=True)
    if rank == 0:
        channel.close()
        time.sleep(2.0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_no_process_stays_behind(tmp_path):
    """Neither after a good end nor after a kill."""
    ends = run_side_by_side(2, {"end": (end_with_a_stand_in,)}, folder=tmp_path)["end"]
    deadline = time.monotonic() + 10.0
    pids = [int(end.stdout.split()[-1]) for end in ends]
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
