"""The package's logger: a file per rank, and warnings of rank 0 on stderr."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

LOGGER_NAME = "rlhf_megatron"
_HANDLER_NAME = "rlhf_megatron.run"


class _HidingFormatter(logging.Formatter):
    """Passes each finished line, traceback included, through `hide`."""

    def __init__(self, line: str, *, hide: Callable[[str], str]) -> None:
        super().__init__(line)
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        return self._hide(super().format(record))


def rank_log(output_dir: str | Path, *, rank: int) -> Path:
    """The log file of a rank."""
    return Path(output_dir) / "logs" / f"rank_{rank:04d}.log"


def setup_logging(
    output_dir: str | Path, *, rank: int, hide: Callable[[str], str] = str
) -> logging.Logger:
    """Send the logger "rlhf_megatron" and its children to OUTPUT_DIR/logs/rank_0000.log.

    Level INFO, or DEBUG with RLHF_MEGATRON_DEBUG=1. Rank 0 shows warnings and errors on stderr as
    well; the other ranks are silent there, so that a message appears once. `hide` takes secrets
    out of each line (Secrets.hide). Called again (another run in the same process), it replaces its
    own handlers and leaves others alone.
    """
    logger = logging.getLogger(LOGGER_NAME)
    python_warnings = logging.getLogger("py.warnings")  # filled by logging.captureWarnings
    for owner in (logger, python_warnings):
        for handler in list(owner.handlers):
            if handler.get_name() == _HANDLER_NAME:
                owner.removeHandler(handler)
                handler.close()
    path = rank_log(output_dir, rank=rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")]
    line = f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"
    handlers[0].setFormatter(_HidingFormatter(line, hide=hide))
    if rank == 0:
        console = logging.StreamHandler(sys.stderr)
        console.setLevel(logging.WARNING)
        console.setFormatter(_HidingFormatter("%(levelname)s: %(message)s", hide=hide))
        handlers.append(console)
    for handler in handlers:
        handler.set_name(_HANDLER_NAME)
        logger.addHandler(handler)
    python_warnings.addHandler(handlers[0])
    debug = os.environ.get("RLHF_MEGATRON_DEBUG") == "1"
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    # vLLM and Megatron-Core put handlers on the root logger, which would print everything again.
    logger.propagate = False
    return logger
