"""What scorers take and give. Imports no torch: reward workers and servers stay small."""

import math
import numbers
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FLOAT32_MAX = 3.4028234663852886e38


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


class NoScoreError(Exception):
    """In place of a score: why there is none, as it is to be shown."""

    def __init__(self, reason: str, *, unavailable: bool = False) -> None:
        """`unavailable`: the fault lies with whoever was to score, not with the response, so that
        the same sample may well be scored later."""
        super().__init__(reason)
        self.unavailable = unavailable


Scorer = Callable[[Sequence[ScoringInput]], Sequence[Any]]
"""Gives for each sample its score, or the exception that scoring it raised."""


class PendingScores(ABC):
    """Scores that are being made elsewhere, of samples that may come one by one."""

    @abstractmethod
    def add(self, sample: ScoringInput) -> None:
        """One more sample to score, before `all_added`. Does not wait."""

    @abstractmethod
    def all_added(self) -> None:
        """No more samples come."""

    @property
    @abstractmethod
    def num_scored(self) -> int:
        """Samples whose outcome is there."""

    @abstractmethod
    def result(self) -> list[Any]:
        """Waits for them, after `all_added`. Of each sample, in the order in which they were added,
        its score or an exception."""

    @abstractmethod
    def cancel(self) -> None:
        """Nobody waits for them any more: what has not begun is left out. Harmless afterwards."""


class BackgroundScorer(ABC):
    """A Scorer that works while its caller does something else."""

    @abstractmethod
    def begin(self) -> PendingScores:
        """Scores of samples that are still to come."""

    @abstractmethod
    def take_counts(self) -> dict[str, float]:
        """What has happened since the last call, by the name of a metric."""

    def start(self, samples: Sequence[ScoringInput]) -> PendingScores:
        """Begin with the samples, which are all, and return."""
        pending = self.begin()
        for sample in samples:
            pending.add(sample)
        pending.all_added()
        return pending

    def __call__(self, samples: Sequence[ScoringInput]) -> list[Any]:
        return self.start(samples).result()


def failure_reason(outcome: Any) -> str | None:
    """Why `outcome` is no usable score, on one line; None where it is one.

    Usable is a finite number within float32: bool, int, float, a NumPy number, a tensor or array
    without dimensions.
    """
    if isinstance(outcome, NoScoreError):
        return one_line(str(outcome))
    if isinstance(outcome, Exception):
        return f"raised {type(outcome).__name__}: {one_line(str(outcome))}{_origin(outcome)}"
    if not _is_number(outcome):
        shown = one_line(repr(outcome))[:80]
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


def one_line(text: str) -> str:
    return " ".join(text.split())


def _is_number(value: Any) -> bool:
    if isinstance(value, numbers.Real):
        return True
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.ndim == 0 and not value.is_complex()
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return value.ndim == 0 and value.dtype.kind in "biuf"
    return False


def _origin(error: Exception) -> str:
    """File and line where `error` was raised, in brackets."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
