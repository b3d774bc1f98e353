"""What each phase of a step took: seconds and memory; and what its collectives moved.

All _gb are 10^9 bytes.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import psutil
import torch

GB = 1e9
STEP = "step"
"""Name of the record that covers a whole step."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Memory of this process. On a GPU: tensors, the caching allocator's hold, and the largest
    tensors since the last reset. On a CPU all three are the resident set."""

    allocated_gb: float
    reserved_gb: float
    peak_gb: float


def memory_use(device: torch.device) -> MemoryUse:
    """Memory of this process on `device` as of now."""
    if device.type == "cuda":
        return MemoryUse(
            allocated_gb=torch.cuda.memory_allocated(device) / GB,
            reserved_gb=torch.cuda.memory_reserved(device) / GB,
            peak_gb=torch.cuda.max_memory_allocated(device) / GB,
        )
    resident = psutil.Process().memory_info().rss / GB
    return MemoryUse(allocated_gb=resident, reserved_gb=resident, peak_gb=resident)


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """One passage through a phase on one rank: a line of ledger.jsonl.

    allocated and reserved are as of the exit. peak is the largest in between on a GPU; on a CPU,
    which keeps no such mark, the larger of entry and exit.
    """

    step: int
    rank: int
    phase: str
    seconds: float
    allocated_gb: float
    reserved_gb: float
    peak_gb: float


@dataclass(frozen=True, kw_only=True)
class CommunicationRecord:
    """What one purpose moved in a step through one kind of collective: a line of ledger.jsonl."""

    step: int
    rank: int
    purpose: str
    collective: str
    calls: int
    bytes: int
    seconds: float


class PhaseListener(Protocol):
    """Called as phases begin and end on this rank."""

    def phase_entered(self, *, step: int, phase: str) -> None:
        """The phase has begun; time spent here counts as its own."""

    def phase_exited(self, record: PhaseRecord) -> None:
        """The phase is over. Not called where an exception ended it."""


class CommunicationLedger:
    """Bytes, calls and seconds of this rank's collectives, by purpose and collective."""

    def __init__(self) -> None:
        self._totals: dict[tuple[str, str], tuple[int, int, float]] = {}

    def record(
        self, purpose: str, *, num_bytes: int, seconds: float, collective: str = "", calls: int = 1
    ) -> None:
        """Add to a purpose such as "reshard". Bytes are those that this rank received."""
        key = (purpose, collective)
        old_calls, old_bytes, old_seconds = self._totals.get(key, (0, 0, 0.0))
        self._totals[key] = (old_calls + calls, old_bytes + num_bytes, old_seconds + seconds)

    def take(self, *, step: int, rank: int) -> list[CommunicationRecord]:
        """The totals since the last call, which start again from nothing."""
        totals, self._totals = self._totals, {}
        return [
            CommunicationRecord(
                step=step,
                rank=rank,
                purpose=purpose,
                collective=collective,
                calls=calls,
                bytes=num_bytes,
                seconds=seconds,
            )
            for (purpose, collective), (calls, num_bytes, seconds) in sorted(totals.items())
        ]


@dataclass
class StepLedger:
    """The records of one step: of this rank, or, concatenated, of all."""

    phases: list[PhaseRecord] = field(default_factory=list)
    communication: list[CommunicationRecord] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Metric keys of the records; with several ranks, each figure of the worst of them.

        time/<phase>_seconds (passages added up), memory/<phase>_peak_gb, both with "step" for the
        whole, and gpu/memory_active_gb: allocated at the step's end (resident set on a CPU).
        """
        seconds: dict[str, dict[int, float]] = {}
        peaks: dict[str, float] = {}
        for record in self.phases:
            ranks = seconds.setdefault(record.phase, {})
            ranks[record.rank] = ranks.get(record.rank, 0.0) + record.seconds
            peaks[record.phase] = max(peaks.get(record.phase, 0.0), record.peak_gb)
        result = {f"time/{phase}_seconds": max(of.values()) for phase, of in seconds.items()}
        result |= {f"memory/{phase}_peak_gb": peak for phase, peak in peaks.items()}
        ends = [record.allocated_gb for record in self.phases if record.phase == STEP]
        if ends:
            result["gpu/memory_active_gb"] = max(ends)
        return result


def merge_ledgers(parts: Sequence[StepLedger]) -> StepLedger:
    """The records of all ranks as one."""
    return StepLedger(
        phases=[record for part in parts for record in part.phases],
        communication=[record for part in parts for record in part.communication],
    )


def append_ledger(output_dir: str | Path, *, ledger: StepLedger) -> None:
    """Append the records to OUTPUT_DIR/ledger.jsonl, in a single write.

    One rank writes the records of all, gathered: appends of several nodes to one file get lost on
    network file systems.
    """
    path = Path(output_dir) / "ledger.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(record) for record in ledger.phases]
    rows += [asdict(record) for record in ledger.communication]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


class PhaseLedger:
    """Measures the phases of one rank, one step after another.

        ledger.start_step(3)
        with ledger.phase("rollout"):
            ...
        step_ledger = ledger.finish_step()

    On a GPU the device is synchronised where a phase begins and ends, so that its work is counted
    where it was asked for, and the peak of the allocator is reset at the entry. Phases do not nest;
    a phase entered twice in a step gives two records. `current_phase` may be read by other threads.
    """

    def __init__(self, *, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.step = 0
        self.current_phase: str | None = None
        """Name of the running phase; after an exception the phase that raised."""
        self.phase_started_seconds = time.monotonic()
        """time.monotonic() of the last entry into a phase."""
        self.last_phase: str | None = None
        """Name of the phase that ended last."""
        self.progress = 0
        """Rises where a phase begins or ends, and with `go_on`: the same on all ranks that have
        come equally far."""
        self.listeners: list[PhaseListener] = []
        self.communication = CommunicationLedger()
        self._inside = False
        self._device = device
        self._records: list[PhaseRecord] = []
        self._step_started_seconds = time.monotonic()

    def start_step(self, step: int) -> None:
        """Begin a step's records and its clock; those of a step left unfinished are dropped."""
        self.step = step
        self.current_phase = None
        self._records = []
        self.communication.take(step=step, rank=self.rank)
        self._step_started_seconds = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the block as phase `name`. Its record is kept also where the block raises."""
        assert not self._inside, f"{name} inside {self.current_phase}"
        self._synchronize()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        entry = memory_use(self._device)
        self.phase_started_seconds = time.monotonic()
        self.current_phase = name
        self.progress += 1
        self._inside = True
        try:
            for listener in self.listeners:
                listener.phase_entered(step=self.step, phase=name)
            yield
            self._synchronize()
        finally:
            self._inside = False
            seconds = time.monotonic() - self.phase_started_seconds
            record = self._record(name, seconds=seconds, least_peak_gb=entry.peak_gb)
        self.current_phase, self.last_phase = None, name
        self.progress += 1
        for listener in self.listeners:
            listener.phase_exited(record)

    def go_on(self) -> None:
        """Within a long phase: its next part begins, and the time limit of a phase anew."""
        self.progress += 1

    def describe_position(self) -> str:
        """Where this rank is, for a message: "rollout of step 3", "step 3, after rollout"."""
        if self.current_phase is not None:
            return f"{self.current_phase} of step {self.step}"
        return f"step {self.step}, after {self.last_phase}" if self.last_phase else "setup"

    def finish_step(self) -> StepLedger:
        """The step's records of this rank, closed by one for the whole step."""
        seconds = time.monotonic() - self._step_started_seconds
        peak = max((record.peak_gb for record in self._records), default=0.0)
        self._record(STEP, seconds=seconds, least_peak_gb=peak)
        records, self._records = self._records, []
        return StepLedger(records, self.communication.take(step=self.step, rank=self.rank))

    def _record(self, phase: str, *, seconds: float, least_peak_gb: float) -> PhaseRecord:
        now = memory_use(self._device)
        record = PhaseRecord(
            step=self.step,
            rank=self.rank,
            phase=phase,
            seconds=seconds,
            allocated_gb=now.allocated_gb,
            reserved_gb=now.reserved_gb,
            peak_gb=max(now.peak_gb, least_peak_gb),
        )
        self._records.append(record)
        return record

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
