"""Node names as Slurm writes them, and where the ranks of a job meet."""

from __future__ import annotations

import re
from itertools import product

FIRST_PORT = 10_000
NUM_PORTS = 20_000
"""Below 32768: Linux hands the ports above it to outgoing connections."""


def expand_hostlist(text: str) -> list[str]:
    """The names of `n[1-3,07],login`: n1, n2, n3, n07, login.

    What `scontrol show hostnames` prints, where there is no scontrol, as in a container. Raises
    ValueError where brackets do not match or a range is none.
    """
    return [name for part in _split(text) for name in _expand(part)]


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    parts, depth, current = [], 0, ""
    for character in text.strip():
        depth += {"[": 1, "]": -1}.get(character, 0)
        if depth not in (0, 1):
            break
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    if depth != 0:
        raise ValueError(f"{text}: brackets do not match")
    return [part for part in [*parts, current] if part]


def _expand(part: str) -> list[str]:
    pieces = re.split(r"\[([^\]]*)\]", part)  # fixed, ranges, fixed, ranges, ..., fixed
    choices = [_numbers(p) if i % 2 else [p] for i, p in enumerate(pieces)]
    return ["".join(chosen) for chosen in product(*choices)]


def _numbers(ranges: str) -> list[str]:
    found = []
    for text in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        if match is None:
            raise ValueError(f"[{ranges}]: not a list of ranges")
        first, last = match.group(1), match.group(2) or match.group(1)
        if int(last) < int(first):
            raise ValueError(f"[{ranges}]: {text} goes down")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return found


def tasks_per_node(text: str) -> list[int]:
    """SLURM_TASKS_PER_NODE, a number a node: `2(x3),1` is 2, 2, 2, 1. Raises ValueError."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{text}: not a list like 8(x4),2")
        found += [int(match.group(1))] * int(match.group(2) or 1)
    return found


def master_port(job_id: int, *, restarts: int) -> int:
    """The port at which the ranks of this start meet: another one for each job on a node, and for
    each restart, in case the one before was taken."""
    return FIRST_PORT + (job_id + 7919 * restarts) % NUM_PORTS
