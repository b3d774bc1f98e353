"""A time limit for a call of the user's code."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class _TooLong(BaseException):
    """Not an Exception, so that the user's own handlers let it through."""


@contextmanager
def time_limit(seconds: float, *, name: str = "reward.timeout_seconds=") -> Iterator[None]:
    """Raises TimeoutError where the block takes longer, in the middle of it if it can be
    interrupted: by SIGALRM, which Python heeds between two of its instructions and in its waits,
    on the main thread alone. 0: no limit. `name` is said before the number.

    Limits nest. A block that sets an alarm of its own, or runs on another thread, is judged when it
    is over.
    """
    if seconds == 0:
        yield
        return
    started = time.monotonic()
    on_main = threading.current_thread() is threading.main_thread()
    former = signal.signal(signal.SIGALRM, _interrupt) if on_main else None
    outer_seconds = 0.0
    try:
        try:
            if on_main:
                outer_seconds = signal.setitimer(signal.ITIMER_REAL, seconds)[0]
            yield
        finally:
            if on_main:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except _TooLong:
        late = True
    else:
        late = time.monotonic() - started > seconds
    finally:
        if on_main:
            signal.signal(signal.SIGALRM, former or signal.SIG_DFL)
            if outer_seconds > 0:  # at once, where it has passed meanwhile
                left = outer_seconds - (time.monotonic() - started)
                signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3))
    if late:
        text = f"{name}{seconds:g}" if name.endswith("=") else f"{name} {seconds:g} s"
        raise TimeoutError(f"took longer than {text}")


def _interrupt(*_: object) -> NoReturn:
    raise _TooLong
