"""Progress of a job's ranks in bytes, on rank 0's screen."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import TracebackType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

PAINT_SECONDS = 0.5
BAR_CHARACTERS = 24


class Progress:
    """Counts the bytes of all ranks, and shows them on rank 0: a bar with rate and time left on a
    terminal, one line at the end elsewhere. A context manager.

    done_bytes: asked by rank 0 in place of what the ranks `add`, where others do the work.
    """

    def __init__(
        self,
        label: str,
        *,
        total_bytes: int,
        rank: int,
        done_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._label, self._total_bytes, self._rank = label, total_bytes, rank
        self._key = f"rlhf_megatron/progress/{label}"
        self._done_bytes = done_bytes
        self._store: TCPStore | None = None
        if done_bytes is None:  # a connection of its own: the default store's may be busy waiting
            self._store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=60),
                wait_for_workers=False,
            )
        self._pending_bytes = 0
        self._flushed_at = self._started_at = time.perf_counter()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, num_bytes: int) -> None:
        """Count bytes of this rank."""
        self._pending_bytes += num_bytes
        if time.perf_counter() - self._flushed_at > PAINT_SECONDS / 2:
            self._flush()

    def __enter__(self) -> "Progress":
        if self._rank == 0 and sys.stderr.isatty():
            self._thread = threading.Thread(target=self._paint_until_stopped, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._flush()
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            print(file=sys.stderr)
        elif self._rank == 0 and error is None:
            print(self.line(self._total_bytes), file=sys.stderr, flush=True)

    def line(self, done_bytes: int) -> str:
        """What is shown: label, bar, bytes, rate, time left."""
        seconds = max(time.perf_counter() - self._started_at, 1e-9)
        fraction = min(done_bytes / self._total_bytes, 1.0) if self._total_bytes else 1.0
        filled = round(fraction * BAR_CHARACTERS)
        rate = done_bytes / seconds
        left = (self._total_bytes - done_bytes) / rate if rate else 0.0
        end = f"{left:.0f} s left" if fraction < 1 else f"{seconds:.1f} s"
        return (
            f"{self._label:<8} [{'#' * filled:<{BAR_CHARACTERS}}] {done_bytes / 1e6:,.1f} of "
            f"{self._total_bytes / 1e6:,.1f} MB, {rate / 1e6:,.0f} MB/s, {end}"
        )

    def _flush(self) -> None:
        if self._store is not None and self._pending_bytes:
            self._store.add(self._key, self._pending_bytes)
        self._pending_bytes = 0
        self._flushed_at = time.perf_counter()

    def _paint_until_stopped(self) -> None:
        while not self._stopping.wait(PAINT_SECONDS):
            print(f"\r{self.line(self._count()):<100}", end="", file=sys.stderr, flush=True)
        print(f"\r{self.line(self._count()):<100}", end="", file=sys.stderr, flush=True)

    def _count(self) -> int:
        if self._done_bytes is not None:
            return self._done_bytes()
        assert self._store is not None
        return int(self._store.add(self._key, 0))


def folder_bytes(folder: Path) -> int:
    """Sizes of the files directly in a folder, some of which may be on their way in or out."""
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.glob("*"):
        try:
            yield path.stat().st_size
        except FileNotFoundError:
            continue
