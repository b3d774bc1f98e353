"""Signs of life: what each rank is doing, where its neighbour and, in need, all others can read it.

Each rank writes to the job's store, every few seconds and at each change, what it is doing; the
rank before it in the ring of ranks reads that. It says when its neighbour has died, which publishes
no error, and when it has been at one thing for longer than its limit, which it may not be able to
say itself. A neighbour in the same process namespace is looked for among the processes: that shows
its end at once and by no mistake, however long a call may keep its threads from running.
"""

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

BEAT_SECONDS = 2.0
READ_SECONDS = 0.5
"""A rank that stops within so long of entering a phase is named with the phase before."""
LONGEST_STEP_SECONDS = 2 * BEAT_SECONDS
"""A watcher that was itself held up for longer counts no more than this as silence."""
GRACE_SECONDS = 3.0
"""A rank beyond its limit may say so itself for so long before its neighbour does."""

_KEY = "alive"


@dataclass(frozen=True)
class Position:
    """Where a rank is."""

    phase: str
    """For a message: "rollout of step 3"."""
    number: int = 0
    """Rises as the rank goes on; ranks that have come equally far have the same."""
    limit_seconds: float = 0.0
    """How long it may stay there; 0: as long as it likes."""
    limit_key: str = ""
    """What has set the limit."""


@dataclass(frozen=True)
class Sign:
    """What a rank has last said of itself."""

    phase: str
    number: int
    limit_seconds: float
    limit_key: str
    beat: int
    namespace: str
    pid: int
    started: str

    @property
    def position(self) -> Position:
        return Position(self.phase, self.number, self.limit_seconds, self.limit_key)


class Stay:
    """How long a rank has been where it is, as seen from here: while this process was stopped (a
    suspended job) or held up, its clock stands."""

    def __init__(self, position: Position = Position(""), *, seconds: float = 0.0) -> None:
        self._position, self._seconds = position, seconds
        self._ticked_at = time.monotonic()

    def see(self, position: Position) -> None:
        """Where the rank is now."""
        self.tick()
        if (position.phase, position.number) != (self._position.phase, self._position.number):
            self._seconds = 0.0
        self._position = position

    def tick(self) -> None:
        """The rank is where it was. To be called more often than LONGEST_STEP_SECONDS."""
        now = time.monotonic()
        self._seconds += min(now - self._ticked_at, LONGEST_STEP_SECONDS)
        self._ticked_at = now

    @property
    def position(self) -> Position:
        return self._position

    @property
    def seconds(self) -> float:
        return self._seconds

    def is_overdue(self, *, grace_seconds: float = 0.0) -> bool:
        limit = self._position.limit_seconds
        return limit > 0 and self._seconds > limit + grace_seconds


class Heartbeat:
    """This rank's sign of life, and the watch over the next rank's. Used by one thread; the stays
    may be read by others."""

    def __init__(self, store: Store, *, rank: int, world_size: int, silent_seconds: float) -> None:
        """`silent_seconds`: a neighbour elsewhere without a new sign for so long counts as dead."""
        self._store, self._rank = store, rank
        self.watched = (rank + 1) % world_size
        self.own_stay, self.watched_stay = Stay(), Stay()
        self._alone = world_size == 1
        self._silent_seconds = silent_seconds
        self._namespace, self._started = _namespace(), _start_time(os.getpid())
        self._beats, self._is_shown = 0, True
        self._position = Position("")
        self._beat_at = self._read_at = self._looked_at = time.monotonic() - LONGEST_STEP_SECONDS
        self._seen: Sign | None = None
        self._silence_seconds = 0.0

    @property
    def watched_phase(self) -> str:
        """What the watched rank was last seen doing."""
        return self._seen.phase if self._seen is not None else "start"

    def beat(self, position: Position) -> None:
        """Show that this rank is alive, unless it has been shown a moment ago."""
        self.own_stay.see(position)
        now = time.monotonic()
        is_shown = position == self._position and now - self._beat_at < BEAT_SECONDS
        if self._alone or is_shown or not self._is_shown:
            return
        self._beats, self._position, self._beat_at = self._beats + 1, position, now
        self._store.set(f"{_KEY}/{self._rank}", json.dumps(asdict(self.sign(position))))

    def sign(self, position: Position) -> Sign:
        """What this rank says of itself."""
        return Sign(
            **asdict(position),
            beat=self._beats,
            namespace=self._namespace,
            pid=os.getpid(),
            started=self._started,
        )

    @property
    def watched_sign(self) -> Sign | None:
        """The last one of the rank that is watched; None where it has not begun."""
        return self._seen

    def stand_in(self, position: Position, *, seconds: float, watched: Sign | None) -> None:
        """For a rank that is held up there, and has been for `seconds`: watch and give no sign."""
        self._is_shown, self._seen = False, watched
        self.own_stay = Stay(position, seconds=seconds)

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
        if now - self._read_at >= READ_SECONDS:
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

    def process_state(self) -> str:
        """What the kernel says of the watched rank's process, to be read after "its process"."""
        seen = self._seen
        if seen is None or not self._is_near():
            return "is on another node"
        return process_state(seen)

    def end_watched_process(self) -> None:
        """SIGKILL to the watched rank's process, which answers no more, where it is near."""
        seen = self._seen
        if seen is not None and self._is_near() and _start_time(seen.pid) == seen.started:
            with suppress(OSError):
                os.kill(seen.pid, signal.SIGKILL)

    def last_sign(self, rank: int) -> Sign | None:
        """What `rank` has last said of itself; None where it has not begun."""
        key = f"{_KEY}/{rank}"
        if not self._store.check([key]):
            return None
        return Sign(**json.loads(self._store.get(key)))

    def sees(self, sign: Sign) -> bool:
        """Whether the process of the sign can be seen from here."""
        return self._namespace == sign.namespace != ""

    def _is_near(self) -> bool:
        return self._seen is not None and self.sees(self._seen)

    def _read(self) -> bool:
        """Whether there is a new sign."""
        sign = self.last_sign(self.watched)
        if sign is None:
            return False
        new, self._seen = sign != self._seen, sign
        self.watched_stay.see(sign.position)
        return new


def process_state(sign: Sign) -> str:
    """What the kernel says of a process that can be seen from here, to be read after
    "its process"."""
    if _start_time(sign.pid) != sign.started:
        return "is gone"
    try:
        state = Path(f"/proc/{sign.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "is gone"
    states = {
        "T": "is stopped (as by SIGSTOP)",
        "t": "is stopped by a debugger",
        "D": "waits in the kernel (a disk, a network file system, a driver)",
    }
    return states.get(state, "runs, but its threads do not: a call outside Python holds them up")


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
