"""The sampled responses of a step, one JSON object a line."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RolloutRow:
    """One sampled response and what became of it."""

    prompt: str
    response: str
    reward: float | None
    """The score before any clip or penalty; None (also for NaN) where there is none."""
    truncated: bool
    prompt_tokens: int
    """Length of the prompt in tokens."""
    response_tokens: int
    """Length of the response in tokens, EOS included."""
    prompt_id: int
    sample_index: int
    weight_version: int


def rollouts_path(output_dir: str | Path, *, step: int) -> Path:
    """OUTPUT_DIR/rollouts/step_000010.jsonl."""
    return Path(output_dir) / "rollouts" / f"step_{step:06d}.jsonl"


def write_rollouts(output_dir: str | Path, *, step: int, rows: Sequence[RolloutRow]) -> Path:
    """Write a step's responses; the file appears whole or not at all. Returns its path."""
    path = rollouts_path(output_dir, step=step)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".jsonl.partial")
    # A byte-level tokenizer can yield lone surrogates, which UTF-8 refuses: backslashreplace turns
    # them into the \udcxx that JSON reads back.
    with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in rows:
            fields = asdict(row)
            if row.reward is not None and not math.isfinite(row.reward):
                fields["reward"] = None
            file.write(json.dumps(fields, ensure_ascii=False) + "\n")
    os.replace(partial, path)
    return path
