"""Scores of responses as numbers that training can trust: who failed is named, or dropped."""

import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.errors import UserError

SHOWN_CHARACTERS = 200
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class ScoringInput:
    """One response to score."""

    prompt: str
    response: str
    prompt_id: int
    sample_index: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The prompt row's other fields."""

    messages: tuple[Mapping[str, str], ...] | None = None
    """The prompt's chat messages, where it has any: a reward model reads them whole."""


Scorer = Callable[[Sequence[ScoringInput]], Sequence[Any]]
"""Gives for each sample its score, or the exception that scoring it raised."""


@dataclass(frozen=True, kw_only=True)
class ScoringFailure:
    """A sample without a usable score."""

    prompt_id: int
    sample_index: int
    reason: str
    response: str

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt_id}, sample {self.sample_index}: {self.reason}; "
            f"response {self.response[:SHOWN_CHARACTERS]!r}"
        )


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of N samples."""

    rewards: Tensor
    """Float32 [N] on the CPU; NaN where a sample is dropped."""

    failed: list[ScoringFailure]


def score_batch(
    samples: Sequence[ScoringInput],
    *,
    scorer: Scorer,
    on_error: str = "stop",
    error_value: float = 0.0,
) -> Scores:
    """Score all samples.

    A usable score is a finite number: bool, int, float, a NumPy number, a tensor or array without
    dimensions. on_error (reward.on_error): "stop" or "drop" where there is none, or take
    `error_value` ("value").

    Raises UserError under "stop", naming the first sample that failed, why, and its response.
    """
    outcomes = scorer(samples)
    rewards = torch.full((len(samples),), math.nan, dtype=torch.float32)
    failed: list[ScoringFailure] = []
    for i, (sample, outcome) in enumerate(zip(samples, outcomes, strict=True)):
        reason = _failure_reason(outcome)
        if reason is None:
            rewards[i] = float(outcome)
            continue
        failed.append(
            ScoringFailure(
                prompt_id=sample.prompt_id,
                sample_index=sample.sample_index,
                reason=reason,
                response=sample.response,
            )
        )
    if failed and on_error == "stop":
        count = "1 response has" if len(failed) == 1 else f"{len(failed)} responses have"
        raise UserError(
            f"reward: {count} no score; {failed[0]}; "
            "mend the reward, or set reward.on_error=drop to leave such samples out, or value to "
            "give them reward.error_value"
        )
    if failed and on_error == "value":
        rewards[torch.isnan(rewards)] = error_value
    return Scores(rewards=rewards, failed=failed)


def _failure_reason(outcome: Any) -> str | None:
    """Why `outcome` is no usable score, on one line; None where it is one."""
    if isinstance(outcome, Exception):
        return f"raised {type(outcome).__name__}: {_one_line(str(outcome))}{_origin(outcome)}"
    if not _is_number(outcome):
        shown = _one_line(repr(outcome))[:80]
        return f"returned {shown} ({type(outcome).__name__}), must be a number"
    try:
        value = float(outcome)
    except OverflowError:  # an integer beyond float64
        value = math.inf
    if math.isnan(value):
        return "returned nan"
    if abs(value) > FLOAT32_MAX:
        return f"returned {value}, beyond float32"
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    if isinstance(value, np.ndarray | np.generic):
        return value.ndim == 0 and value.dtype.kind in "biuf"
    return isinstance(value, numbers.Real)


def _origin(error: Exception) -> str:
    """File and line where `error` was raised, in brackets."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
