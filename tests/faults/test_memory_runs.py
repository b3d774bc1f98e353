"""Whole runs whose memory is offloaded, or runs out."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from tiny_run import Job, assert_same_run, listen_to_phases, settings

OFFLOADED = {
    f"{role}__offload_{kind}": "true"
    for role in ("actor", "critic")
    for kind in ("weights", "gradients", "optimizer")
} | {"ref__offload": "true"}


class MovesOnCpu:
    """Offload really empties storages, as on a GPU."""

    def install(self, rank: int) -> None:
        from rlhf_megatron import trainer
        from rlhf_megatron.offloading import Offloader

        def moving(*arguments: Any, **options: Any) -> Offloader:
            return Offloader(*arguments, **options, moves=True)

        trainer.Offloader = moving  # type: ignore[misc, assignment]


def test_a_run_with_everything_offloaded_is_the_run_without(files, whole, tmp_path):
    """Two steps, then the rest in a second start from the checkpoint."""
    for number, steps in enumerate((2, 5)):
        words = settings(files, output=tmp_path / "run", **OFFLOADED, run__steps=steps)
        words += ["checkpoint.resume=auto"]
        job = Job(words, logs=tmp_path / f"logs_{number}", trigger=MovesOnCpu())
        assert job.wait() == [0] * 4, job.text()
    assert "offload, on this rank: actor.weights 0.0" in job.text()
    assert_same_run(tmp_path / "run", expected=whole)
    ledger = [json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()]
    moved = [line for line in ledger if line.get("purpose") == "offload"]
    assert {line["collective"] for line in moved} == {"to_host", "to_device"}
    assert all(line["bytes"] > 0 and line["calls"] > 0 for line in moved)


@dataclass(frozen=True, kw_only=True)
class MemoryRunsOut:
    """On one rank, in one phase."""

    phase: str
    rank: int
    of_python: bool = False

    def install(self, rank: int) -> None:
        if rank == self.rank:
            listen_to_phases(self)

    def phase_entered(self, *, step: int, phase: str) -> None:
        if phase != self.phase or step != 2:
            return
        if self.of_python:
            raise MemoryError
        import torch

        torch.empty(1 << 46)  # 281 TB: torch's own error

    def phase_exited(self, record: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("trigger", "cause"),
    [
        (
            MemoryRunsOut(phase="update_critic", rank=1),
            "DefaultCPUAllocator: can't allocate memory",
        ),
        (MemoryRunsOut(phase="rollout", rank=0, of_python=True), "MemoryError"),
    ],
    ids=["update_critic", "rollout"],
)
def test_out_of_memory_is_answered_once_with_what_lies_where(files, tmp_path, trigger, cause):
    words = settings(
        files,
        output=tmp_path / "run",
        actor__parallel__pipeline_model_parallel_size=1,
        critic__parallel__pipeline_model_parallel_size=1,
        ref__parallel__pipeline_model_parallel_size=1,
        checkpoint__interval_steps=0,
        warmup__steps=0,
        evaluation__prompts="",
        logging__monitor_interval_steps=1,
    )
    job = Job(words, logs=tmp_path / "logs", world_size=2, trigger=trigger)
    assert job.wait() == [1, 1], job.text()
    text = job.text()
    assert text.count("error: ") == 1, text
    message = text[text.index("error: ") :]
    first = message.splitlines()[0]
    where = f"{trigger.phase} of step 2"
    assert first.startswith(f"error: out of memory on rank {trigger.rank}, cpu, in {where}: ")
    assert cause in first
    assert "Traceback" not in message
    assert "largest tensors that Python holds:" in message
    assert "actor weights (" in message and "actor gradients (" in message
    if trigger.phase == "update_critic":  # the step so far
        assert "peak of each phase of this step so far, GB:" in message
        assert "  rollout  " in message and "  value  " in message
    assert "[Step 1] CPU: process memory | Resident: " in text
    log = (tmp_path / "run" / "logs" / f"rank_{trigger.rank:04d}.log").read_text()
    assert "Traceback" in log and "memory after the setup" in log


def test_a_summary_is_written_on_request(files, tmp_path):
    words = settings(
        files,
        output=tmp_path / "run",
        run__steps=2,
        actor__parallel__pipeline_model_parallel_size=1,
        critic__parallel__pipeline_model_parallel_size=1,
        ref__parallel__pipeline_model_parallel_size=1,
        checkpoint__interval_steps=0,
        warmup__steps=0,
        evaluation__prompts="",
    )
    job = Job(words, logs=tmp_path / "logs", world_size=2, trigger=Touch(str(tmp_path / "run")))
    assert job.wait() == [0, 0], job.text()
    for rank in (0, 1):
        log = (tmp_path / "run" / "logs" / f"rank_{rank:04d}.log").read_text()
        assert log.count("memory after step 1, as ") == 1
        assert "memory after step 2" not in log


@dataclass(frozen=True)
class Touch:
    """Asks for a summary in step 1."""

    folder: str

    def install(self, rank: int) -> None:
        if rank == 0:
            listen_to_phases(self)

    def phase_entered(self, *, step: int, phase: str) -> None:
        if (step, phase) == (1, "log_prob"):
            from pathlib import Path

            (Path(self.folder) / "memory_summary").touch()

    def phase_exited(self, record: Any) -> None:
        pass
