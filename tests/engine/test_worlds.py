"""Engine worlds without an engine: torch's default group is exchanged and put back."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlhf_megatron.rollout import vllm_fit
from rlhf_megatron.rollout.worlds import make_engine_groups

ENGINES = [(1, 2)]  # rank 0 rolls nothing out


def world_rank(rank: int, scratch: Path) -> dict[str, Any]:
    (group,) = make_engine_groups(ENGINES, device="cpu")
    seen: dict[str, Any] = {}
    if rank in ENGINES[0]:
        vllm_fit.self_test(group)
        with vllm_fit.as_world(group, local_rank=group.rank()):
            seen["inside"] = (dist.get_rank(), dist.get_world_size())
            seen["variables"] = [os.environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
            os.environ["LOCAL_WORLD_SIZE"] = "99"  # as vLLM does
            value = torch.tensor([dist.get_rank() + 1.0])
            dist.all_reduce(value)
            seen["sum_inside"] = value.item()
            for _ in range(5):  # an engine makes groups that the other ranks know nothing of
                dist.new_group([0, 1])
    vllm_fit.level_group_count()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=dist.new_group([0, 1, 2]))
    variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {
        **seen,
        "outside": (dist.get_rank(), dist.get_world_size()),
        "variables_after": [os.environ[k] for k in variables],
        "sum_of_new_group": total.item(),
    }


def test_an_engine_is_a_world_of_its_own(run_ranks, tmp_path: Path) -> None:
    results = run_ranks(world_rank, world_size=3, scratch=tmp_path)
    assert [r.get("inside") for r in results] == [None, (0, 2), (1, 2)]
    assert [r.get("variables") for r in results] == [None, ["0", "2", "0"], ["1", "2", "1"]]
    assert [r.get("sum_inside") for r in results] == [None, 3.0, 3.0]
    assert [r["outside"] for r in results] == [(0, 3), (1, 3), (2, 3)]
    assert [r["variables_after"] for r in results] == [[str(i), "3", str(i), "3"] for i in range(3)]
    assert [r["sum_of_new_group"] for r in results] == [6.0] * 3


@pytest.mark.parametrize("engines", [[(1, 0)], [(0, 1), (1, 2)]])
def test_permuted_or_overlapping_engines_are_refused(engines: list[tuple[int, ...]]) -> None:
    with pytest.raises(AssertionError):
        make_engine_groups(engines, device="cpu")


def test_self_test_names_the_torch_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(distributed_c10d, "_update_default_pg")
    with pytest.raises(RuntimeError, match=rf"torch {torch.__version__.split('+')[0]}"):
        vllm_fit.self_test(None)  # type: ignore[arg-type]
