"""Signs of life: a rank that is killed publishes no error, so its neighbour says that it is gone.

Each rank writes to the job's store, every few seconds and at each change, what it is doing; the
rank before it in the ring of ranks reads that. A neighbour in the same process namespace is looked
for among the processes instead, which shows its end at once and by no mistake: however long a call
may keep its threads from running, it is not dead while its process is there.
"""

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

BEAT_SECONDS = 2.0
LONGEST_STEP_SECONDS = 2 * BEAT_SECONDS
"""A watcher that was itself held up for longer counts no more than this as silence."""

_KEY = "alive"


@dataclass(frozen=True)
class _Sign:
    phase: str
    beat: int
    namespace: str
    pid: int
    started: str


class Heartbeat:
    """This rank's sign of life, and the watch over the next rank's. Used by one thread."""

    def __init__(self, store: Store, *, rank: int, world_size: int, silent_seconds: float) -> None:
        """`silent_seconds`: a neighbour elsewhere without a new sign for so long counts as dead."""
        self._store, self._rank = store, rank
        self.watched = (rank + 1) % world_size
        self._alone = world_size == 1
        self._silent_seconds = silent_seconds
        self._namespace, self._started = _namespace(), _start_time(os.getpid())
        self._beats, self._phase = 0, ""
        self._beat_at = self._read_at = self._looked_at = time.monotonic() - LONGEST_STEP_SECONDS
        self._seen: _Sign | None = None
        self._silence_seconds = 0.0

    @property
    def watched_phase(self) -> str:
        """What the watched rank was last seen doing."""
        return self._seen.phase if self._seen is not None else "start"

    def beat(self, phase: str) -> None:
        """Show that this rank is alive, unless it has been shown a moment ago."""
        now = time.monotonic()
        if self._alone or (phase == self._phase and now - self._beat_at < BEAT_SECONDS):
            return
        self._beats, self._phase, self._beat_at = self._beats + 1, phase, now
        sign = _Sign(phase, self._beats, self._namespace, os.getpid(), self._started)
        self._store.set(f"{_KEY}/{self._rank}", json.dumps(asdict(sign)))

    def death(self) -> str:
        """How the watched rank is known to be dead; "" while it lives, or has not begun."""
        if self._alone:
            return ""
        if self.process_is_gone():
            self._read()  # its last words: the phase
            return "its process is gone, as after SIGKILL or the kernel's out-of-memory killer"
        now = time.monotonic()
        passed, self._looked_at = now - self._looked_at, now
        self._silence_seconds += min(passed, LONGEST_STEP_SECONDS)
        if now - self._read_at >= BEAT_SECONDS / 2:
            self._read_at = now
            if self._read():
                self._silence_seconds = 0.0
        if self._seen is None or self._is_near():
            return ""
        if self._silence_seconds > self._silent_seconds:
            return f"it gave no sign of life for {self._silence_seconds:.0f} s"
        return ""

    def process_is_gone(self) -> bool:
        """Whether the watched rank's process has ended; False where that cannot be seen."""
        seen = self._seen
        return seen is not None and self._is_near() and _start_time(seen.pid) != seen.started

    def _is_near(self) -> bool:
        """Whether the watched rank's process can be seen from here."""
        return self._seen is not None and self._namespace == self._seen.namespace != ""

    def _read(self) -> bool:
        """Whether there is a new sign."""
        key = f"{_KEY}/{self.watched}"
        if not self._store.check([key]):
            return False
        sign = _Sign(**json.loads(self._store.get(key)))
        new, self._seen = sign != self._seen, sign
        return new


def _namespace() -> str:
    """The kernel and process namespace, within which process ids mean the same; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """When the process began, in the kernel's ticks; "" where there is none (a zombie is none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]
