"""Error agreement: one rank's exception ends all ranks, in seconds, with that rank's message."""

import os
import time

import pytest
import torch.distributed as dist
from pool import run_side_by_side

from rlhf_megatron.distributed.failure import FailureChannel
from rlhf_megatron.errors import UserError

ENDED_WITHIN_SECONDS = 20.0
"""On a busy machine; the channel itself takes about 1.5."""


def job(rank: int, delays: dict[int, float], kind: type[Exception], is_host: bool = False) -> None:
    """Ranks in `delays` (seconds) raise, the others wait for them in a collective."""
    if is_host:
        _host_a_store(rank)
    channel = FailureChannel(rank=rank, world_size=3, current_phase=lambda: f"phase_of_{rank}")
    channel.start()
    try:
        dist.barrier()
        if rank in delays:
            time.sleep(delays[rank])
            raise kind(f"trouble on {rank}")
        dist.barrier()
    except BaseException as error:
        channel.report(error)


def _host_a_store(rank: int) -> None:
    """As without a launcher's store: rank 0's process hosts it, and takes it along when it ends."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = [store.port if rank == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    os.environ["MASTER_PORT"] = str(shared[0])
    globals()["_kept"] = store


def finished(rank: int) -> None:
    channel = FailureChannel(rank=rank, world_size=3)
    channel.start()
    time.sleep(0.5)
    dist.barrier()
    channel.close()
    dist.barrier()
    os._exit(0)


def messages(ends, text: str) -> list[int]:
    """How often `text` stands in each rank's stderr."""
    assert all(end.seconds < ENDED_WITHIN_SECONDS for end in ends)
    return [end.stderr.count(text) for end in ends]


CALLS = {
    "user's error": (job, {1: 0.0}, UserError),
    "exception": (job, {2: 0.0}, RuntimeError),
    "user's error of rank 0": (job, {0: 0.0}, UserError, True),
    "exception of rank 0": (job, {0: 0.0}, RuntimeError, True),
    "two": (job, {2: 0.0, 1: 0.4}, UserError),
    "all": (job, {0: 0.0, 1: 0.0, 2: 0.0}, UserError),
    "none": (finished,),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Of all jobs, which run at once."""
    return run_side_by_side(3, CALLS, folder=tmp_path_factory.mktemp("failure"))


def test_a_users_error_is_said_once_by_rank_0(ends):
    ends = ends["user's error"]
    assert [end.exit_code for end in ends] == [2, 2, 2]
    assert messages(ends, "trouble on 1") == [1, 0, 0]
    assert "error: trouble on 1\n" in ends[0].stderr
    assert messages(ends, "Traceback") == [0, 0, 0]


def test_an_exception_is_said_with_its_rank_phase_and_traceback(ends):
    ends = ends["exception"]
    assert [end.exit_code for end in ends] == [1, 1, 1]
    assert "rank 2 failed in phase_of_2: RuntimeError: trouble on 2" in ends[0].stderr
    assert messages(ends, "Traceback") == [1, 0, 0]
    assert messages(ends, 'raise kind(f"trouble on {rank}")') == [1, 0, 0]


@pytest.mark.parametrize(
    ("name", "exit_code"), [("user's error of rank 0", 2), ("exception of rank 0", 1)]
)
def test_rank_0_may_fail_itself_and_host_the_store(ends, name, exit_code):
    assert [end.exit_code for end in ends[name]] == [exit_code] * 3
    assert messages(ends[name], "error: ") == [1, 0, 0]


def test_of_two_failures_the_first_is_reported(ends):
    ends = ends["two"]
    assert [end.exit_code for end in ends] == [2, 2, 2]
    assert messages(ends, "trouble on 2") == [1, 0, 0]
    assert messages(ends, "trouble on 1") == [0, 0, 0]


def test_all_ranks_failing_alike_say_it_once(ends):
    ends = ends["all"]
    assert [end.exit_code for end in ends] == [2, 2, 2]
    assert messages(ends, "trouble on") == [1, 0, 0]


def test_a_job_that_ends_well_says_nothing(ends):
    ends = ends["none"]
    assert [end.exit_code for end in ends] == [0, 0, 0]
    assert messages(ends, "error") == [0, 0, 0]
