"""The roll call: who is missing, by name, before torch.distributed waits for all without a word."""

import os
import shutil
import socket
import subprocess
import time
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from rlhf_megatron.distributed.watchdog import ranks_in_words
from rlhf_megatron.errors import UserError

KEY = "distributed.join_timeout_seconds"
POLL_SECONDS = 0.1
ANSWER_GRACE_SECONDS = 15.0
"""So long after the limit the others wait for rank 0's word."""
LINGER_SECONDS = 1.0
"""Rank 0 may host the store: the others have to read its word before it leaves."""

_ALL_HERE = "all here"


def call_roll(
    store: Store, *, rank: int, world_size: int, local_world_size: int, timeout_seconds: float
) -> None:
    """Wait until all ranks have come to the store. Raises UserError, on all that came, which names
    those that did not within `timeout_seconds`."""
    store.set(f"roll/{rank}", socket.gethostname())
    store.add("roll/present", 1)
    if rank == 0:
        text = _await_all(
            store,
            world_size=world_size,
            local_world_size=local_world_size,
            timeout_seconds=timeout_seconds,
        )
        store.set("roll/answer", text)
        if text == _ALL_HERE:
            return
        time.sleep(LINGER_SECONDS)
        raise UserError(text)
    try:
        store.wait(["roll/answer"], timedelta(seconds=timeout_seconds + ANSWER_GRACE_SECONDS))
        text = store.get("roll/answer").decode()
    except RuntimeError as error:
        raise UserError(
            f"rank {rank} on {socket.gethostname()}: rank 0 has not come within "
            f"{timeout_seconds:g} s ({KEY}), or has gone ({_first_line(error)}); look for its error"
        ) from None
    if text != _ALL_HERE:
        raise UserError(text)


def _await_all(
    store: Store, *, world_size: int, local_world_size: int, timeout_seconds: float
) -> str:
    """_ALL_HERE, or who is missing."""
    deadline = time.monotonic() + timeout_seconds
    while store.add("roll/present", 0) < world_size:
        if time.monotonic() > deadline:
            return _who_is_missing(
                store,
                world_size=world_size,
                local_world_size=local_world_size,
                timeout_seconds=timeout_seconds,
            )
        time.sleep(POLL_SECONDS)
    return _ALL_HERE


def _who_is_missing(
    store: Store, *, world_size: int, local_world_size: int, timeout_seconds: float
) -> str:
    here = [rank for rank in range(world_size) if store.check([f"roll/{rank}"])]
    hosts = list(dict.fromkeys(store.get(f"roll/{rank}").decode() for rank in here))
    missing = [rank for rank in range(world_size) if rank not in here]
    names = _slurm_nodes()
    nodes = list(dict.fromkeys(rank // local_world_size for rank in missing))
    named = [names[node] for node in nodes if node < len(names)]
    where = f" on {', '.join(named)}" if named else f" (node {', '.join(map(str, nodes))})"
    return (
        f"{ranks_in_words(missing)} of {world_size}{where}: not come within {timeout_seconds:g} s "
        f"({KEY}), while {ranks_in_words(here)} on {', '.join(hosts)} waited. Look for an error of "
        "theirs in the job's output; see whether those nodes are up and reach "
        f"{os.environ.get('MASTER_ADDR', 'rank 0')}:{os.environ.get('MASTER_PORT', '')}"
    )


def _slurm_nodes() -> list[str]:
    """The allocation's nodes in the order of the ranks; [] where Slurm does not say."""
    text = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    if not text or shutil.which("scontrol") is None:
        return []
    try:
        return subprocess.run(
            ["scontrol", "show", "hostnames", text],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
