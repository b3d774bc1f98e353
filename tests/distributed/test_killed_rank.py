"""A rank that is killed in the middle of a sync ends the job, with a message that names it."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from pool import run_side_by_side
from small_reshards import ARCHITECTURES, CPU, filled, full_state, train_layouts
from test_failure import _host_a_store

from rlhf_megatron.distributed import heartbeat
from rlhf_megatron.distributed.failure import FailureChannel
from rlhf_megatron.layout.vllm import vllm_layouts
from rlhf_megatron.reshard.execute import Resharder
from rlhf_megatron.reshard.plan import make_plan

WORLD_SIZE = 4
WITHIN_SECONDS = 60.0


def sync_for_ever(rank: int, victim: int, is_host: bool, number: int) -> None:
    """Syncs of two pipeline stages, until the victim gets the signal `number` in one of them."""
    if is_host:
        _host_a_store(rank)
    channel = FailureChannel(
        rank=rank,
        world_size=WORLD_SIZE,
        current_phase=lambda: "reshard of step 2",
        silent_seconds=6.0,
    )
    channel.start()
    try:
        arch = ARCHITECTURES["llama"]
        source = train_layouts(arch, tp=2, pp=2)
        target = vllm_layouts(arch, engines=[(0, 1), (2, 3)])
        resharder = Resharder(
            make_plan(source, target, itemsize_bytes=4, bucket_bytes=4096, ranks=[rank]),
            rank=rank,
            group=dist.group.WORLD,
            source=filled(source[rank], state=full_state(arch), dtype=torch.float32),
            target=filled(target[rank], state=None, dtype=torch.float32),
            dtype=torch.float32,
            device=CPU,
        )
        resharder.run()
        if rank == victim:
            threading.Timer(2.0, os.kill, (os.getpid(), number)).start()
        while True:
            resharder.run()
            time.sleep(0.01)
    except BaseException as error:
        channel.report(error)


CASES = [(2, False), (3, True), (0, False), (0, True)]


@pytest.fixture(scope="module")
def all_ends(tmp_path_factory):
    """Of all cases, which run at once."""
    calls = {case: (sync_for_ever, *case, signal.SIGKILL) for case in CASES}
    return run_side_by_side(WORLD_SIZE, calls, folder=tmp_path_factory.mktemp("killed"))


@pytest.mark.parametrize(("victim", "is_host"), CASES)
def test_the_killed_rank_and_its_phase_are_named_once(all_ends, victim, is_host):
    ends = all_ends[victim, is_host]
    others = [rank for rank in range(WORLD_SIZE) if rank != victim]
    assert ends[victim].exit_code == -signal.SIGKILL
    assert [ends[rank].exit_code for rank in others] == [1] * len(others)
    assert max(end.seconds for end in ends) < WITHIN_SECONDS
    said = "".join(end.stderr for end in ends)
    assert said.count(f"error: rank {victim} died in reshard of step 2: its process is gone") == 1
    assert said.count("error: ") == 1


def stopped(rank: int, same_node: bool) -> None:
    """Rank 1 stands still: its process is there, but gives no sign."""
    if not same_node:
        heartbeat._namespace = lambda: f"node {rank}"  # in this forked process only
    channel = FailureChannel(
        rank=rank, world_size=3, current_phase=lambda: "rollout of step 7", silent_seconds=4.0
    )
    channel.start()
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(10.0)
    os._exit(8)


@pytest.fixture(scope="module")
def silent_ends(tmp_path_factory):
    """By whether the ranks are on one node; both at once."""
    calls = {same_node: (stopped, same_node) for same_node in (False, True)}
    folder = tmp_path_factory.mktemp("silent")
    return run_side_by_side(3, calls, folder=folder, timeout_seconds=16.0)


@pytest.mark.parametrize("same_node", [False, True])
def test_a_rank_that_stands_still_is_dead_only_on_another_node(silent_ends, same_node):
    """Seen from the same node its process is there, and a long call may hold up its threads."""
    ends = silent_ends[same_node]
    assert [end.exit_code is None for end in ends] == [False, True, False]
    said = ends[0].stderr + ends[2].stderr
    found = said.count("error: rank 1 died in rollout of step 7: it gave no sign of life for")
    assert found == (0 if same_node else 1)
