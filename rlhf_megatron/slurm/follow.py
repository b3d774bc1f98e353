"""Shows a growing file on the screen."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType

POLL_SECONDS = 1.0
CHUNK_CHARACTERS = 65536


class Follower:
    """Within its `with`, what is written to the file appears on standard output, as `tail -f`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follow", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._path.exists():
            if self._ended.wait(POLL_SECONDS):
                break
        if not self._path.exists():
            return
        with self._path.open(encoding="utf-8", errors="replace") as file:
            ended = False
            while not ended:
                ended = self._ended.wait(POLL_SECONDS)  # what came before the end is shown still
                while text := file.read(CHUNK_CHARACTERS):
                    sys.stdout.write(text)
                    sys.stdout.flush()
