"""Sampled responses for a report: some steps, and some responses of each, cut to a length."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

MOST_STEPS = 12
RESPONSES_PER_STEP = 6
LONGEST_CHARACTERS = 2000
MOST_CHARACTERS = 600_000
"""Of the samples of all runs together: what keeps the file small."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response; the texts are as the model wrote them, and not to be trusted."""

    prompt: str
    response: str
    reward: float | None
    truncated: bool
    response_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """By step, the responses with the lowest and highest rewards, and some in between."""

    by_step: dict[int, list[Sample]] = field(default_factory=dict)
    num_responses: dict[int, int] = field(default_factory=dict)
    """By step, how many there are in the file."""
    num_files: int = 0
    """Steps with a file of responses."""


def read_samples(folder: Path, *, num_runs: int = 1) -> StepSamples:
    """Responses of some files of RUN/rollouts. `num_runs`: runs that share the report's room."""
    paths = {}
    for path in folder.glob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isdigit():
            paths[int(number)] = path
    # The same steps of runs that are side by side, as far as they have the same number of steps.
    chosen = spread(sorted(paths), most=MOST_STEPS)
    room = MOST_CHARACTERS // (num_runs * MOST_STEPS * RESPONSES_PER_STEP * 2)
    longest = min(room, LONGEST_CHARACTERS)
    by_step, num_responses = {}, {}
    for step in chosen:
        rows = _rows(paths[step])
        if not rows:
            continue
        num_responses[step] = len(rows)
        rows.sort(key=_reward_of)
        by_step[step] = [
            _sample(row, longest=longest) for row in spread(rows[::-1], most=RESPONSES_PER_STEP)
        ]
    return StepSamples(by_step=by_step, num_responses=num_responses, num_files=len(paths))


def spread(items: Sequence[T], *, most: int) -> list[T]:
    """At most so many of the items, in order: the first, the last, and evenly between."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    rows.append(row)
    except OSError:
        return []
    return rows


def _reward_of(row: dict[str, Any]) -> float:
    """Those without a score come first."""
    reward = row.get("reward")
    is_number = isinstance(reward, int | float) and math.isfinite(reward)
    return float(reward) if is_number and reward is not None else -math.inf


def _sample(row: dict[str, Any], *, longest: int) -> Sample:
    reward, tokens = _reward_of(row), row.get("response_tokens")
    return Sample(
        # The end of a prompt is nearest to the response.
        prompt=_cut(str(row.get("prompt", "")), longest=longest, keep_end=True),
        response=_cut(str(row.get("response", "")), longest=longest),
        reward=reward if math.isfinite(reward) else None,
        truncated=bool(row.get("truncated")),
        response_tokens=tokens if isinstance(tokens, int) else None,
    )


def _cut(text: str, *, longest: int, keep_end: bool = False) -> str:
    # A lone surrogate, as a byte-level tokenizer can yield, cannot be written as UTF-8.
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= longest:
        return text
    left_out = f"[{len(text) - longest} characters left out]"
    return f"{left_out} {text[-longest:]}" if keep_end else f"{text[:longest]} {left_out}"
