"""What of a run a checkpoint holds beside weights and optimizers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from rlhf_megatron.errors import UserError
from rlhf_megatron.evaluation import EvaluationReport
from rlhf_megatron.observability.rollouts import RolloutRow
from rlhf_megatron.placed_role import PlacedRole


class Stateful(Protocol):
    """A part of the loop that goes on where it was. Its state is plain JSON values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TensorState(Protocol):
    """A part of the loop whose state holds tensors, as torch.save takes them with weights_only;
    None where it holds nothing now. Its tensors are never changed in place."""

    def tensor_state(self) -> dict[str, Any] | None: ...

    def load_tensor_state(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything that a resumed run needs from a checkpoint."""

    roles: Mapping[str, PlacedRole]
    """The trained roles, with their optimizers."""
    ref: PlacedRole | None
    """The reference, where it can be had from nowhere else: after a supervised warm-up."""
    parts: Mapping[str, Stateful]
    """Whatever else has a state, by name. A new part is added here and nowhere else."""
    tensors: Mapping[str, TensorState] = field(default_factory=dict)
    """Parts whose state holds tensors, the same on all ranks: each has a file of its name."""

    def parts_state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_parts(self, state: Mapping[str, Any]) -> None:
        """Raises UserError where a part is missing."""
        missing = sorted(self.parts.keys() - state.keys())
        if missing:
            raise UserError(f"resume: the checkpoint's state.json lacks {', '.join(missing)}")
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


@dataclass
class Evaluations:
    """The evaluations that a run still needs: the first and last for the comparison at its end, the
    best one for checkpoints/best."""

    first: EvaluationReport | None = None
    last: EvaluationReport | None = None
    best_step: int | None = None
    best_reward_mean: float = 0.0
    """Of the best one, where there is one."""

    def add(self, report: EvaluationReport) -> bool:
        """Whether it is the best so far."""
        self.first = self.first or report
        self.last = report
        if self.best_step is not None and not report.reward_mean > self.best_reward_mean:
            return False
        self.best_step, self.best_reward_mean = report.step, report.reward_mean
        return True

    def state_dict(self) -> dict[str, Any]:
        return {
            "first": _as_json(self.first),
            "last": _as_json(self.last),
            "best_step": self.best_step,
            "best_reward_mean": self.best_reward_mean,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first, self.last = _from_json(state["first"]), _from_json(state["last"])
        self.best_step = state["best_step"]
        self.best_reward_mean = state["best_reward_mean"]


def _as_json(report: EvaluationReport | None) -> dict[str, Any] | None:
    return None if report is None else asdict(report)


def _from_json(state: dict[str, Any] | None) -> EvaluationReport | None:
    if state is None:
        return None
    rows = [RolloutRow(**row) for row in state["rows"]]
    return EvaluationReport(step=state["step"], metrics=state["metrics"], rows=rows)
