"""Where a rank is in the examination: what the watchdog goes by (distributed/failure.py)."""

from rlhf_megatron.distributed.heartbeat import Position

TIMEOUT_KEY = "doctor.timeout_seconds"


class Watch:
    """Each part has the same time limit, some have more."""

    def __init__(self, *, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._position = Position("preflight", 0, timeout_seconds, TIMEOUT_KEY)

    def enter(self, what: str, *, more_seconds: float = 0.0) -> None:
        """What the rank does from now on."""
        self._position = Position(
            f"preflight: {what}",
            self._position.number + 1,
            self._timeout_seconds + more_seconds,
            TIMEOUT_KEY,
        )

    def position(self) -> Position:
        """As of now. May be called from any thread."""
        return self._position
