"""Faults planted in a sync itself: the plan, or a rank's weights. Verification names each."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks
from small_reshards import ARCHITECTURES, CPU, filled, full_state, train_layouts, verdict

from rlhf_megatron.layout.tensors import logical_tensors
from rlhf_megatron.layout.vllm import vllm_layouts
from rlhf_megatron.reshard.execute import Resharder
from rlhf_megatron.reshard.plan import RankPlan, ReshardPlan, Transfer, make_plan

ENGINES = [(0, 1), (2, 3)]
TRAINING = {"tp": 2, "pp": 1, "dp": 2}, {"tp": 2, "pp": 2, "dp": 1}


def changed(plan: ReshardPlan, change: Callable[[Transfer], Transfer]) -> ReshardPlan:
    """The plan with each transfer of the listed ranks changed."""
    by_rank = {
        rank: RankPlan(
            [change(t) for t in mine.copies],
            [[change(t) for t in bucket] for bucket in mine.sends],
            [[change(t) for t in bucket] for bucket in mine.receives],
        )
        for rank, mine in plan.by_rank.items()
    }
    return replace(plan, by_rank=by_rank)


def shifted_by_a_row(transfer: Transfer) -> Transfer:
    """Read one row further on; what goes to rank 1 of one tensor alone."""
    if transfer.tensor != "model.layers.2.mlp.up_proj.weight" or transfer.dst != 1:
        return transfer
    rows, columns = transfer.source_region
    # Up comes after gate, so that there are rows before it in its parameter.
    return replace(transfer, source_region=(slice(rows.start - 1, rows.stop - 1), columns))


def sync_with(rank: int, fault: str) -> str:
    """One sync with the fault, and what the verification says after it."""
    arch = ARCHITECTURES["llama"]
    source_layouts = train_layouts(arch, **TRAINING[fault != "stale"])
    target_layouts = vllm_layouts(arch, engines=ENGINES)
    planned = target_layouts
    if fault == "skipped":
        kept = {
            id(x): tuple(p for p in x if ".layers.3." not in p.tensor)
            for x in target_layouts.values()
        }
        planned = {r: kept[id(x)] for r, x in target_layouts.items()}
    plan = make_plan(source_layouts, planned, itemsize_bytes=4, bucket_bytes=4096, ranks=[rank])
    if fault == "shifted":
        plan = changed(plan, shifted_by_a_row)
    seed = 9 if fault == "stale" and rank == 3 else 1
    source = filled(source_layouts[rank], state=full_state(arch, seed=seed), dtype=torch.float32)
    # What an earlier sync has left, so that a skipped tensor is full of plausible numbers.
    target = filled(target_layouts[rank], state=full_state(arch, seed=5), dtype=torch.float32)
    Resharder(
        plan,
        rank=rank,
        group=dist.group.WORLD,
        source=source,
        target=target,
        dtype=torch.float32,
        device=CPU,
    ).run()
    return verdict(
        arch,
        rank=rank,
        source_layouts=source_layouts,
        target_layouts=target_layouts,
        source=source,
        target=target,
    )


FAULTS = ("shifted", "skipped", "stale", "none")


def sync_with_each(rank: int) -> dict[str, str]:
    return {fault: sync_with(rank, fault) for fault in FAULTS}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What all ranks say alike of each fault."""
    first, *others = run_ranks(4, sync_with_each)
    assert all(other == first for other in others)
    return first


def lines(said: dict[str, str], fault: str) -> list[str]:
    return said[fault].splitlines()[1:]


def test_a_box_shifted_by_a_row(said):
    assert lines(said, "shifted") == [
        "  - model.layers.2.mlp.up_proj.weight: the target side of rank 1 differs"
    ]


def test_a_skipped_layer(said):
    arch = ARCHITECTURES["llama"]
    names = [t.name for t in logical_tensors(arch, head="lm") if ".layers.3." in t.name]
    assert lines(said, "skipped") == [
        f"  - {name}: the target side of rank 0, 1, 2, 3 differs" for name in sorted(names)
    ]


def test_a_rank_with_stale_weights(said):
    """Its copy of what rank 1 has too, and all that it gave to the engines."""
    found = lines(said, "stale")
    assert "  - lm_head.weight: the source side of rank 3 differs" in found
    assert "  - lm_head.weight: the target side of rank 3 differs" in found
    assert not any("rank 0" in line or "rank 1" in line for line in found)


def test_nothing_is_said_without_a_fault(said):
    assert said["none"] == ""
