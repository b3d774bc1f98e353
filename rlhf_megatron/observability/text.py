"""Text for a terminal: one line, a known width, nothing that moves the cursor."""

import math
import unicodedata

_ELLIPSIS = "..."


def one_line(text: str) -> str:
    """`text` with newlines, tabs and all other unprintable characters escaped.

    Sampled text is not trusted: a raw escape sequence in it would reach the terminal.
    """
    return "".join(ch if ch.isprintable() else ch.encode("unicode_escape").decode() for ch in text)


def display_width(text: str) -> int:
    """Columns that printable text takes: wide East Asian characters two, combining marks none."""
    return sum(_character_width(ch) for ch in text)


def _character_width(ch: str) -> int:
    if unicodedata.combining(ch):
        return 0
    return 2 if unicodedata.east_asian_width(ch) in "WF" else 1


def cut(text: str, *, width: int, keep_end: bool = False) -> str:
    """Shorten to at most `width` columns; three dots stand for what is cut from the end (from the
    start with `keep_end`)."""
    if display_width(text) <= width:
        return text
    room = width - len(_ELLIPSIS)
    if room <= 0:
        return _ELLIPSIS[: max(width, 0)]
    kept: list[str] = []
    for ch in reversed(text) if keep_end else text:
        room -= _character_width(ch)
        if room < 0:
            break
        kept.append(ch)
    if keep_end:
        return _ELLIPSIS + "".join(reversed(kept))
    return "".join(kept) + _ELLIPSIS


def pad(text: str, *, width: int) -> str:
    """Fill up with spaces on the right to `width` columns."""
    return text + " " * max(width - display_width(text), 0)


def format_number(value: float) -> str:
    """At most ten characters: 12, 0.1234, 12346, 1.23e-06, nan."""
    if isinstance(value, int) and abs(value) < 10**8:
        return str(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e3:
        return f"{value:.4g}"
    if 1e3 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.2e}"
