"""What a role's updates of a step are, and what they did."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.engine.model_engine import StepResult
from rlhf_megatron.micro_batches import PackingFigures, packing_metrics

MiniBatch = list[int]
"""Sample numbers of one optimizer step."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One of a role's updates within a step."""

    role: str
    """actor or critic."""
    number: int
    """From 1."""
    count: int
    """How many the step has."""
    step_batch: RaggedBatch
    samples: Sequence[int]
    """Those of the step's batch that it is made from."""

    @property
    def batch(self) -> RaggedBatch:
        """Its mini-batch: a copy, made when asked for."""
        return self.step_batch.select(list(self.samples))


class UpdateGuard(Protocol):
    """Decides, on all ranks alike, which updates are taken."""

    @property
    def wants_norm(self) -> bool:
        """Whether it has to see the gradient's norm."""

    def takes(self, result: StepResult, *, update: Update) -> bool: ...


class NoGuard:
    """Takes every update."""

    wants_norm = False

    def takes(self, result: StepResult, *, update: Update) -> bool:
        return True


@dataclass
class UpdateReport:
    """What a role's updates of one step did."""

    steps: list[StepResult] = field(default_factory=list)
    """Those that were taken."""
    mini_batches: list[MiniBatch] = field(default_factory=list)
    """The samples of each optimizer step that was taken."""
    packings: list[PackingFigures] = field(default_factory=list)
    """Of all gradients, taken or not."""
    stopped_early: bool = False

    def metrics(self) -> dict[str, float]:
        """Means over the optimizer steps; of the ratio's maximum the largest."""
        result: dict[str, float] = {}
        for name in self.steps[0].metrics if self.steps else ():
            values = [step.metrics[name] for step in self.steps]
            result[name] = max(values) if name.endswith("_max") else sum(values) / len(values)
        return result

    def packing_metrics(self, role: str) -> dict[str, float]:
        return packing_metrics(self.packings, role=role)

    @property
    def grad_norm(self) -> float:
        return sum(step.grad_norm for step in self.steps) / max(len(self.steps), 1)
