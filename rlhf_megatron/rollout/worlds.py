"""Engine worlds: each rollout engine has a process group of exactly its ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


def make_engine_groups(
    engines: Sequence[Sequence[int]], *, device: torch.device | str
) -> list[dist.ProcessGroup]:
    """One group per engine, in their order. Collective over the whole job: every rank calls it.

    `engines` holds ascending, disjoint lists of global ranks. A rank outside an engine gets torch's
    placeholder for that engine's group. After the engines were built all ranks of the job must
    call `vllm_fit.level_group_count`.
    """
    taken = [rank for ranks in engines for rank in ranks]
    assert len(taken) == len(set(taken)), engines
    # A permuted engine would give wrong tokens without an error: new_group sorts its ranks.
    assert all(list(ranks) == sorted(ranks) for ranks in engines), engines
    backend = "gloo" if torch.device(device).type == "cpu" else "cpu:gloo,cuda:nccl"
    return [dist.new_group(list(ranks), backend=backend) for ranks in engines]
