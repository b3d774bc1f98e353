"""What each phase of a step took: seconds and memory; and what its collectives moved.

All _gb are 10^9 bytes.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from rlhf_megatron.observability.memory import GB, MemoryUse, memory_use, reset_peak

LEDGER_FILE = "ledger.jsonl"
STEP = "step"
"""Name of the record that covers a whole step."""

EXCHANGE = "exchange"
"""Purpose under which samples and what roles found out about their tokens are recorded."""


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """One passage through a phase on one rank: a line of ledger.jsonl.

    Memory as of the exit, but for the peak, which is the largest in between; on a CPU whose kernel
    keeps no such mark (memory.reset_peak), the larger of entry and exit. alloc_retries are those
    since the entry.
    """

    step: int
    rank: int
    phase: str
    seconds: float
    allocated_gb: float
    reserved_gb: float
    peak_gb: float
    active_gb: float = 0.0
    fragmentation: float = 0.0
    """Reserved but not allocated, as a share of reserved."""
    alloc_retries: int = 0
    device_used_gb: float = 0.0
    """Of the whole GPU, by the driver: other processes and libraries included."""
    entry_gb: float = 0.0
    """Allocated at the entry."""
    start_unix_seconds: float = 0.0
    """time.time() at the entry, by the clock of the rank's host; 0 in the ledgers of older runs."""
    cpu_seconds: float = 0.0
    """Of the process, all its threads: on a CPU what it computed, without what it waited."""
    host: str = ""
    """Name of the rank's host; only in the record of a whole step."""

    @property
    def end_unix_seconds(self) -> float:
        return self.start_unix_seconds + self.seconds


@dataclass(frozen=True, kw_only=True)
class CommunicationRecord:
    """What one purpose moved in a phase through one kind of collective: a line of ledger.jsonl."""

    step: int
    rank: int
    during_phase: str
    """Not `phase`, by which readers know the lines of phases. "" between phases."""
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


class StepListener(Protocol):
    """Called before a step's clock starts and after its records are closed."""

    def step_started(self, step: int) -> None: ...

    def step_finished(self, step: int) -> None: ...


class CommunicationLedger:
    """Bytes, calls and seconds of this rank's transfers, by phase, purpose and collective."""

    def __init__(self) -> None:
        self.phase = ""
        """The running phase; set by the PhaseLedger."""
        self._totals: dict[tuple[str, str, str], tuple[int, int, float]] = {}

    def record(
        self,
        purpose: str,
        *,
        num_bytes: int,
        seconds: float,
        collective: str = "",
        calls: int = 1,
        phase: str | None = None,
    ) -> None:
        """Add to a purpose such as "reshard". Bytes are those that this rank received; `phase`:
        the one in which they were asked for, by default the running one."""
        key = (self.phase if phase is None else phase, purpose, collective)
        old_calls, old_bytes, old_seconds = self._totals.get(key, (0, 0, 0.0))
        self._totals[key] = (old_calls + calls, old_bytes + num_bytes, old_seconds + seconds)

    def take(self, *, step: int, rank: int) -> list[CommunicationRecord]:
        """The totals since the last call, which start again from nothing."""
        totals, self._totals = self._totals, {}
        return [
            CommunicationRecord(
                step=step,
                rank=rank,
                during_phase=phase,
                purpose=purpose,
                collective=collective,
                calls=calls,
                bytes=num_bytes,
                seconds=seconds,
            )
            for (phase, purpose, collective), (calls, num_bytes, seconds) in sorted(totals.items())
        ]


@dataclass
class StepLedger:
    """The records of one step: of this rank, or, concatenated, of all."""

    phases: list[PhaseRecord] = field(default_factory=list)
    communication: list[CommunicationRecord] = field(default_factory=list)

    def metrics(self) -> dict[str, float]:
        """Metric keys of the records; with several ranks, each figure of the worst of them.

        time/<phase>_seconds (passages added up), memory/<phase>_peak_gb, both with "step" for the
        whole; as of the step's end gpu/memory_active_gb, _allocated_gb, _reserved_gb (the resident
        set on a CPU), gpu/memory_used_gb (of the whole GPU) and memory/fragmentation;
        memory/alloc_retries: of the step. exchange/bytes_received: samples and what roles say of
        their tokens, added up over the ranks.
        """
        seconds: dict[str, dict[int, float]] = {}
        peaks: dict[str, float] = {}
        for record in self.phases:
            ranks = seconds.setdefault(record.phase, {})
            ranks[record.rank] = ranks.get(record.rank, 0.0) + record.seconds
            peaks[record.phase] = max(peaks.get(record.phase, 0.0), record.peak_gb)
        result = {f"time/{phase}_seconds": max(of.values()) for phase, of in seconds.items()}
        result |= {f"memory/{phase}_peak_gb": peak for phase, peak in peaks.items()}
        exchanged = [record.bytes for record in self.communication if record.purpose == EXCHANGE]
        if exchanged:
            result["exchange/bytes_received"] = float(sum(exchanged))
        ends = [record for record in self.phases if record.phase == STEP]
        if ends:
            result |= {
                "gpu/memory_active_gb": max(record.active_gb for record in ends),
                "gpu/memory_allocated_gb": max(record.allocated_gb for record in ends),
                "gpu/memory_reserved_gb": max(record.reserved_gb for record in ends),
                "gpu/memory_used_gb": max(record.device_used_gb for record in ends),
                "memory/fragmentation": max(record.fragmentation for record in ends),
                "memory/alloc_retries": float(max(record.alloc_retries for record in ends)),
            }
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
    network file systems. In the order of the steps: checkpoints come before the phases of the step
    that follows them.
    """
    path = Path(output_dir) / LEDGER_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    records: list[PhaseRecord | CommunicationRecord] = sorted(
        [*ledger.phases, *ledger.communication], key=lambda record: record.step
    )
    rows = [asdict(record) for record in records]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


class PhaseLedger:
    """Measures the phases of one rank, one step after another.

        ledger.start_step(3)
        with ledger.phase("rollout"):
            ...
        step_ledger = ledger.finish_step()

    On a GPU the current stream is waited for where a phase begins and ends, so that its work is
    counted where it was asked for; copies on other streams, as of offload, go on. The peak of the
    memory is reset at the entry. Phases do not nest;
    a phase entered twice in a step gives two records. `current_phase` may be read by other threads.
    """

    def __init__(
        self, *, rank: int, device: torch.device, apart: frozenset[str] = frozenset()
    ) -> None:
        """apart: phases that some ranks are in while others are in another one, or in none."""
        self.rank = rank
        self._apart = apart
        self.step = 0
        self.current_phase: str | None = None
        """Name of the running phase; after an exception the phase that raised."""
        self.phase_started_seconds = time.monotonic()
        """time.monotonic() of the last entry into a phase."""
        self.last_phase: str | None = None
        """Name of the phase that ended last."""
        self.progress = 0
        """Rises where a phase that all ranks enter begins or ends, and with `go_on`: the same on
        all ranks that have come equally far."""
        self.listeners: list[PhaseListener] = []
        self.joint_listeners: list[PhaseListener] = []
        """Called after the others, and in phases that all ranks enter only: they may talk to the
        other ranks."""
        self.step_listeners: list[StepListener] = []
        self.communication = CommunicationLedger()
        self.sleeping_bytes: Callable[[], int] = lambda: 0
        """What torch's allocator counts that a sleeping engine has given back to the device
        (RolloutEngine.sleeping_bytes): no figure of memory includes it. Where it changes within a
        phase, the peak includes what was awake at either end."""
        self._inside = False
        self._device = device
        self._records: list[PhaseRecord] = []
        self._host = socket.gethostname()
        self._is_between_steps = False
        self._started = self._step_started = _Moment.now()
        self._step_entry = self._memory()

    def start_step(self, step: int) -> None:
        """Begin a step's records and its clock.

        Phases since the end of the last step, such as a checkpoint, stay with their own step's
        number; those of a step left unfinished are dropped.
        """
        self.step = step
        self.current_phase = None
        if not self._is_between_steps:
            self._records = []
        self._is_between_steps = False
        self.communication.take(step=step, rank=self.rank)
        for listener in self.step_listeners:
            listener.step_started(step)
        self._step_started = _Moment.now()
        self._step_entry = self._memory()

    @contextmanager
    def phase(self, name: str, *, apart: bool = False) -> Iterator[None]:
        """Run the block as phase `name`. Its record is kept also where the block raises.

        apart: not all ranks enter it, though they do at other times.
        """
        assert not self._inside, f"{name} inside {self.current_phase}"
        joint = not apart and name not in self._apart
        listeners = [*self.listeners, *(self.joint_listeners if joint else ())]
        self._synchronize()
        peak_is_known = reset_peak(self._device)
        asleep_bytes, entry = self.sleeping_bytes(), self._memory()
        self._started = _Moment.now()
        self.phase_started_seconds = self._started.monotonic_seconds
        self.current_phase = self.communication.phase = name
        self.progress += joint
        self._inside = True
        try:
            for listener in listeners:
                listener.phase_entered(step=self.step, phase=name)
            yield
            self._synchronize()
        finally:
            self._inside = False
            end = _Moment.now()
            now = self._memory()
            # What was asleep at the entry and is awake now may have been there at the peak.
            peak = now.peak_gb + max(0, self.sleeping_bytes() - asleep_bytes) / GB
            if not peak_is_known:
                peak = max(entry.allocated_gb, now.allocated_gb)
            record = self._record(
                name,
                start=self._started,
                end=end,
                peak_gb=peak,
                entry=entry,
                now=now,
            )
        self.current_phase, self.last_phase = None, name
        self.communication.phase = ""
        self.progress += joint
        for listener in listeners:
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
        end = _Moment.now()
        now = self._memory()
        peaks = [record.peak_gb for record in self._records if record.step == self.step]
        peak = max(peaks, default=now.allocated_gb)
        self._record(
            STEP,
            start=self._step_started,
            end=end,
            peak_gb=peak,
            entry=self._step_entry,
            now=now,
            host=self._host,
        )
        records, self._records = self._records, []
        self._is_between_steps = True
        for listener in self.step_listeners:
            listener.step_finished(self.step)
        return StepLedger(records, self.communication.take(step=self.step, rank=self.rank))

    def _memory(self) -> MemoryUse:
        return memory_use(self._device).without(self.sleeping_bytes() / GB)

    @property
    def records(self) -> list[PhaseRecord]:
        """Those of the step so far."""
        return list(self._records)

    def _record(
        self,
        phase: str,
        *,
        start: "_Moment",
        end: "_Moment",
        peak_gb: float,
        entry: MemoryUse,
        now: MemoryUse,
        host: str = "",
    ) -> PhaseRecord:
        record = PhaseRecord(
            step=self.step,
            rank=self.rank,
            phase=phase,
            seconds=end.monotonic_seconds - start.monotonic_seconds,
            allocated_gb=now.allocated_gb,
            reserved_gb=now.reserved_gb,
            peak_gb=peak_gb,
            active_gb=now.active_gb,
            fragmentation=now.fragmentation,
            alloc_retries=now.alloc_retries - entry.alloc_retries,
            device_used_gb=now.device_used_gb,
            entry_gb=entry.allocated_gb,
            start_unix_seconds=round(start.unix_seconds, 6),
            cpu_seconds=round(end.cpu_seconds - start.cpu_seconds, 6),
            host=host,
        )
        self._records.append(record)
        return record

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


@dataclass(frozen=True, kw_only=True)
class _Moment:
    """An instant by the clocks that a record is made from."""

    monotonic_seconds: float
    unix_seconds: float
    cpu_seconds: float

    @classmethod
    def now(cls) -> "_Moment":
        return cls(
            monotonic_seconds=time.monotonic(),
            unix_seconds=time.time(),
            cpu_seconds=time.process_time(),
        )
