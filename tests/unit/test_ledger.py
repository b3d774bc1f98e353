"""The phase ledger: clocks, memory, listeners, lines, metrics over ranks."""

import json
import re
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import rlhf_megatron.observability.ledger as ledger_module
from rlhf_megatron.observability.ledger import (
    PhaseLedger,
    PhaseRecord,
    StepLedger,
    append_ledger,
    merge_ledgers,
)
from rlhf_megatron.observability.memory import (
    MemoryUse,
    allocator_summary,
    memory_use,
    monitor_line,
    reset_peak,
)
from rlhf_megatron.rollout import vllm_fit

CPU = torch.device("cpu")


class Recorder:
    def __init__(self):
        self.calls = []

    def phase_entered(self, *, step, phase):
        self.calls.append(("enter", step, phase))

    def phase_exited(self, record):
        self.calls.append(("exit", record.step, record.phase))


def test_phases_are_timed_and_summed_into_metrics():
    ledger = PhaseLedger(rank=2, device=CPU)
    ledger.start_step(5)
    for name, seconds in (("rollout", 0.06), ("update_actor", 0.02), ("update_actor", 0.03)):
        with ledger.phase(name):
            time.sleep(seconds)
    step = ledger.finish_step()
    assert [r.phase for r in step.phases] == ["rollout", "update_actor", "update_actor", "step"]
    assert {(r.step, r.rank) for r in step.phases} == {(5, 2)}
    metrics = step.metrics()
    assert 0.06 <= metrics["time/rollout_seconds"] < 5
    assert 0 <= step.phases[0].cpu_seconds < 0.06  # it slept
    assert metrics["time/update_actor_seconds"] >= 0.05
    parts = metrics["time/rollout_seconds"] + metrics["time/update_actor_seconds"]
    assert parts <= metrics["time/step_seconds"] < parts + 5
    for name in ("rollout", "update_actor", "step"):
        assert metrics[f"memory/{name}_peak_gb"] > 0.05  # torch alone is larger
    assert metrics["gpu/memory_active_gb"] == pytest.approx(memory_use(CPU).allocated_gb, rel=0.2)


def test_memory_that_a_phase_takes_is_seen():
    ledger = PhaseLedger(rank=0, device=CPU)
    ledger.start_step(0)
    held = []
    with ledger.phase("before"):
        pass
    with ledger.phase("allocate"):
        held.append(torch.ones(25_000_000))  # 0.1 GB
    with ledger.phase("release"):
        held.clear()
    before, allocate, release, step = ledger.finish_step().phases
    assert allocate.allocated_gb - before.allocated_gb == pytest.approx(0.1, abs=0.02)
    # Released inside: the exit is lower, and the peak is that of the entry.
    assert release.allocated_gb < release.peak_gb == pytest.approx(allocate.peak_gb, abs=0.02)
    assert step.peak_gb == max(allocate.peak_gb, release.peak_gb)


def test_the_peak_of_a_cpu_phase_includes_what_was_freed_inside():
    if not reset_peak(CPU):
        pytest.skip("the kernel keeps no peak that can be reset")
    ledger = PhaseLedger(rank=0, device=CPU)
    ledger.start_step(1)
    with ledger.phase("value"):
        torch.ones(50_000_000).add_(1)  # 0.2 GB
    with ledger.phase("reward"):
        pass
    value, reward, _ = ledger.finish_step().phases
    assert value.peak_gb - value.allocated_gb >= 0.15
    assert reward.peak_gb < value.peak_gb - 0.15


def test_memory_is_that_of_the_entry_and_exit_where_no_peak_is_kept(monkeypatch):
    monkeypatch.setattr("rlhf_megatron.observability.ledger.reset_peak", lambda _: False)
    ledger = PhaseLedger(rank=0, device=CPU)
    held = [torch.ones(25_000_000)]
    with ledger.phase("release"):
        torch.ones(50_000_000)  # not seen
        held.clear()
    (record,) = ledger.records
    assert record.peak_gb == record.entry_gb > record.allocated_gb + 0.05


def test_monitor_line_and_summary_of_a_cpu():
    line = monitor_line(CPU, step=100)
    assert re.fullmatch(r"\[Step 100\] CPU: process memory \| Resident: \d+\.\d{3}GB", line)
    assert "VmRSS" in allocator_summary(CPU)


def test_the_current_phase_is_readable_from_another_thread():
    ledger = PhaseLedger(rank=0, device=CPU)
    seen = []
    with ledger.phase("reshard"):
        watchdog = threading.Thread(
            target=lambda: seen.append((ledger.current_phase, ledger.phase_started_seconds))
        )
        watchdog.start()
        watchdog.join()
    assert seen[0][0] == "reshard" and 0 <= time.monotonic() - seen[0][1] < 5
    assert ledger.current_phase is None


def test_a_phase_that_raises_is_recorded_and_stays_named():
    ledger, recorder = PhaseLedger(rank=0, device=CPU), Recorder()
    ledger.listeners.append(recorder)
    ledger.start_step(1)
    with pytest.raises(RuntimeError, match="broken"), ledger.phase("reward"):
        raise RuntimeError("broken")
    assert ledger.current_phase == "reward"
    with ledger.phase("checkpoint"):  # what cleans up may have a phase of its own
        pass
    assert [r.phase for r in ledger.finish_step().phases] == ["reward", "checkpoint", "step"]
    assert recorder.calls == [
        ("enter", 1, "reward"),
        ("enter", 1, "checkpoint"),
        ("exit", 1, "checkpoint"),
    ]


def test_phases_do_not_nest():
    ledger = PhaseLedger(rank=0, device=CPU)
    with pytest.raises(AssertionError, match="inner inside outer"):  # noqa: SIM117
        with ledger.phase("outer"):
            with ledger.phase("inner"):
                pass


def test_communication_adds_up_by_phase_and_purpose_and_starts_anew_each_step():
    ledger = PhaseLedger(rank=1, device=CPU)
    ledger.start_step(4)
    comm = ledger.communication
    comm.record("reshard", num_bytes=100, seconds=0.5, collective="all_to_all")
    comm.record("reshard", num_bytes=20, seconds=0.25, collective="all_to_all", calls=3)
    with ledger.phase("rollout"):
        comm.record("exchange", num_bytes=7, seconds=0.1)
        comm.record("offload", num_bytes=1, seconds=0.0, phase="log_prob")  # begun before
    reshard, offload, exchange = ledger.finish_step().communication
    assert (reshard.during_phase, exchange.during_phase) == ("", "rollout")
    assert offload.during_phase == "log_prob"
    assert (reshard.bytes, reshard.calls, reshard.seconds) == (120, 4, 0.75)
    assert (reshard.purpose, reshard.collective) == ("reshard", "all_to_all")
    assert (exchange.bytes, exchange.calls, exchange.rank, exchange.step) == (7, 1, 1, 4)
    ledger.start_step(5)
    assert ledger.finish_step().communication == []


def phase_record(rank, phase, seconds, peak):
    return PhaseRecord(
        step=1,
        rank=rank,
        phase=phase,
        seconds=seconds,
        allocated_gb=peak / 2,
        reserved_gb=peak,
        peak_gb=peak,
        active_gb=peak / 4,
        fragmentation=peak / 8,
        alloc_retries=int(peak),
        device_used_gb=peak * 2,
    )


def test_metrics_of_several_ranks_are_those_of_the_worst():
    parts = [
        StepLedger([phase_record(0, "value", 1.0, 4.0), phase_record(0, "step", 3.0, 4.0)]),
        StepLedger(
            [
                phase_record(1, "value", 0.75, 2.0),
                phase_record(1, "value", 0.75, 6.0),
                phase_record(1, "step", 2.0, 6.0),
            ]
        ),
    ]
    assert merge_ledgers(parts).metrics() == {
        "time/value_seconds": 1.5,
        "time/step_seconds": 3.0,
        "memory/value_peak_gb": 6.0,
        "memory/step_peak_gb": 6.0,
        "gpu/memory_active_gb": 1.5,
        "gpu/memory_allocated_gb": 3.0,
        "gpu/memory_reserved_gb": 6.0,
        "gpu/memory_used_gb": 12.0,
        "memory/fragmentation": 0.75,
        "memory/alloc_retries": 6.0,
    }
    assert StepLedger().metrics() == {}


def test_lines_of_the_ledger_file(tmp_path):
    for step in (1, 2):
        ledger = PhaseLedger(rank=0, device=CPU)
        ledger.start_step(step)
        with ledger.phase("rollout"):
            ledger.communication.record("reshard", num_bytes=5, seconds=0.5)
        append_ledger(tmp_path / "run", ledger=ledger.finish_step())
    lines = [json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 1, 1, 2, 2, 2]
    assert [line.get("phase") for line in lines[:3]] == ["rollout", "step", None]
    assert set(lines[0]) == {
        "step",
        "rank",
        "phase",
        "seconds",
        "allocated_gb",
        "reserved_gb",
        "peak_gb",
        "active_gb",
        "fragmentation",
        "alloc_retries",
        "device_used_gb",
        "entry_gb",
        "start_unix_seconds",
        "cpu_seconds",
        "host",
    }
    assert lines[2]["purpose"] == "reshard" and lines[2]["bytes"] == 5
    assert lines[2]["during_phase"] == "rollout"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_peak_of_a_gpu_phase_includes_what_was_freed_inside():
    device = torch.device("cuda", 0)
    ledger = PhaseLedger(rank=0, device=device)
    ledger.start_step(1)
    with ledger.phase("value"):
        torch.ones(25_000_000, device=device).add_(1)
    with ledger.phase("reward"):
        pass
    value, reward, _ = ledger.finish_step().phases
    assert value.peak_gb - value.allocated_gb >= 0.1
    assert reward.peak_gb < value.peak_gb


def test_what_a_sleeping_engine_gave_back_counts_nowhere(monkeypatch):
    """An engine of 40 of 100 GB: torch counts it in its sleep as well."""
    use = MemoryUse(allocated_gb=100.0, reserved_gb=110.0, active_gb=101.0, peak_gb=120.0)
    monkeypatch.setattr(ledger_module, "memory_use", lambda device: use)
    monkeypatch.setattr(ledger_module, "reset_peak", lambda device: True)
    asleep = 0
    ledger = PhaseLedger(rank=0, device=CPU)
    ledger.sleeping_bytes = lambda: asleep
    ledger.start_step(1)
    for phase, after in (("rollout", 0), ("sleep", 40), ("update_actor", 40), ("reshard", 0)):
        with ledger.phase(phase):
            asleep = after * 10**9
    records = {record.phase: record for record in ledger.finish_step().phases}
    peaks = {phase: record.peak_gb for phase, record in records.items()}
    assert peaks == {
        "rollout": 120,
        "sleep": 120,
        "update_actor": 80,
        "reshard": 120,
        "step": 120,
    }
    update = records["update_actor"]
    assert (update.allocated_gb, update.reserved_gb, update.active_gb) == (60, 70, 61)
    assert update.entry_gb == 60 and update.fragmentation == pytest.approx(1 - 60 / 70)
    assert records["step"].allocated_gb == 100


def test_pools_of_sleep_mode_are_counted_by_their_tags(monkeypatch):
    cumem = pytest.importorskip("vllm.device_allocator.cumem", reason="vLLM is not installed here")
    pools = {1: ("weights", 2_000), 2: ("kv_cache", 30_000), 3: ("kv_cache", 500)}
    data = {
        at: SimpleNamespace(tag=tag, handle=(0, size, at, 0)) for at, (tag, size) in pools.items()
    }
    allocator = SimpleNamespace(pointer_to_data=data)
    monkeypatch.setattr(cumem.CuMemAllocator, "get_instance", staticmethod(lambda: allocator))
    assert vllm_fit.pool_bytes({"weights", "kv_cache"}) == 32_500
    assert vllm_fit.pool_bytes({"kv_cache"}) == 30_500
    assert vllm_fit.pool_bytes(set()) == 0
