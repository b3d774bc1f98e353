"""Scores of responses as numbers that training can trust: who failed is named, or dropped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.errors import UserError
from rlhf_megatron.rewards.contract import NoScoreError, Scorer, ScoringInput, failure_reason

SHOWN_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True)
class ScoringFailure:
    """A sample without a usable score."""

    prompt_id: int
    sample_index: int
    reason: str
    response: str
    unavailable: bool = False
    """Whoever was to score is to blame (contract.NoScoreError)."""

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
        reason = failure_reason(outcome)
        if reason is None:
            rewards[i] = float(outcome)
            continue
        failed.append(
            ScoringFailure(
                prompt_id=sample.prompt_id,
                sample_index=sample.sample_index,
                reason=reason,
                response=sample.response,
                unavailable=isinstance(outcome, NoScoreError) and outcome.unavailable,
            )
        )
    if failed and on_error == "stop":
        raise stop_error(failed)
    if failed and on_error == "value":
        rewards[torch.isnan(rewards)] = error_value
    return Scores(rewards=rewards, failed=failed)


def stop_error(failed: Sequence[ScoringFailure]) -> UserError:
    """What ends the run under reward.on_error=stop."""
    count = "1 response has" if len(failed) == 1 else f"{len(failed)} responses have"
    return UserError(
        f"reward: {count} no score; {failed[0]}; "
        "mend the reward, or set reward.on_error=drop to leave such samples out, or value to "
        "give them reward.error_value"
    )
