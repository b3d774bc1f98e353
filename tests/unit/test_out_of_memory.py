"""The out-of-memory report: what counts as one, and what it says with a planner behind it."""

import gc

import pytest
import torch

from rlhf_megatron.config import Config
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.errors import JobError
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.observability.tensors import largest_tensors, live_objects
from rlhf_megatron.out_of_memory import OutOfMemoryReport, is_out_of_memory

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (ValueError("No available memory for the cache blocks. Try increasing"), True),
        (RuntimeError("shape mismatch"), False),
        (JobError("another rank: out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_counts(error, expected):
    assert is_out_of_memory(error) is expected


def report(**hooks) -> tuple[OutOfMemoryReport, PhaseLedger]:
    ledger = PhaseLedger(rank=3, device=CPU)
    context = DistributedContext(
        rank=3,
        world_size=8,
        local_rank=3,
        local_world_size=8,
        device=CPU,
        backend="gloo",
        timeout_seconds=1.0,
        job_group=None,
    )
    return OutOfMemoryReport(Config(), context=context, ledger=ledger, **hooks), ledger


def run_out(found: OutOfMemoryReport, ledger: PhaseLedger) -> str:
    """The message where memory runs out in the second phase."""
    ledger.start_step(4)
    with ledger.phase("value"):
        pass
    try:
        with ledger.phase("update_actor"):
            torch.empty(1 << 46)
    except RuntimeError as error:
        with pytest.raises(JobError) as caught:
            found.raise_for(error)
        assert caught.value.__cause__ is error
        return str(caught.value)
    raise AssertionError


def test_the_message_sets_the_ledger_against_the_plan_and_makes_suggestions():
    asked = []

    def suggest(config, *, phase, world_size):
        asked.append((type(config), phase, world_size))
        return ["recompute", "offload", "more ranks", "a fourth"]

    found, ledger = report(
        suggest=suggest, planned_peaks=lambda config, *, world_size: {"value": 12.5}
    )
    big = torch.ones(3_000_000)
    lines = run_out(found, ledger).splitlines()
    assert lines[0].startswith("out of memory on rank 3, cpu, in update_actor of step 4: ")
    assert "you tried to allocate" in lines[0]
    (value,) = [line for line in lines if line.startswith("  value ")]
    assert value.endswith("planned    12.50")
    assert any(line.startswith("  update_actor ") for line in lines)
    assert any("0.012 GB  float32 [3000000]" in line for line in lines), lines
    assert lines[-4:] == [
        "what would help, best first:",
        "  - recompute",
        "  - offload",
        "  - more ranks",
    ]
    assert asked == [(Config, "update_actor", 8)]
    del big


def test_a_planner_that_fails_does_not_hide_the_error():
    def broken(*_, **__):
        raise ZeroDivisionError

    message = run_out(*report(suggest=broken, planned_peaks=broken))
    assert "out of memory on rank 3" in message and "what would help" not in message


def test_other_errors_are_left_alone():
    report()[0].raise_for(ValueError("wrong"))


def test_largest_tensors_are_named_and_views_counted_once():
    base = torch.zeros(40_000_000)
    views = [base[:10], base[5:]]
    small = torch.zeros(10_000_000)
    lines = largest_tensors(CPU, count=2, names=lambda: {"critic weights: head": small})
    assert lines[0].split() == ["0.160", "GB", "float32", "[40000000]"]
    assert lines[1].endswith("0.040 GB  float32 [10000000]  critic weights: head")
    (line,) = largest_tensors(
        CPU, count=1, names=lambda: {"actor weights: a": views[0], "actor weights: b": views[1]}
    )
    assert line.endswith("float32 [40000000]  actor weights (2 tensors)")


def test_what_is_frozen_for_the_collector_is_found_and_stays_frozen() -> None:
    kept = [torch.zeros(3, 5)]
    gc.freeze()
    try:
        assert not any(thing is kept[0] for thing in gc.get_objects())
        assert any(thing is kept[0] for thing in live_objects())
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
