"""Keys that decide what is kept where, read from a role's options in one place.

`offload_*` and the number of recomputed layers are read with a default, so that a configuration
without these keys plans as if they were off.
"""

from dataclasses import dataclass
from typing import Any

from rlhf_megatron.memory.activations import Recompute


@dataclass(frozen=True, kw_only=True)
class OffloadChoice:
    """What of a role lies on the host outside of the role's own phases."""

    weights: bool = False
    gradients: bool = False
    optimizer: bool = False


@dataclass(frozen=True, kw_only=True)
class RecomputeChoice:
    """How a role's layers are recomputed in the backward pass."""

    granularity: Recompute = "none"
    num_layers: int = 0
    """With "full": the layers of a stage that are recomputed, the others keep all; 0: all."""
    layers_per_checkpoint: int = 1

    def split(self, num_layers: int) -> tuple[int, int]:
        """Of a stage's layers, those that are recomputed whole, and the rest."""
        if self.granularity != "full":
            return 0, num_layers
        full = min(self.num_layers or num_layers, num_layers)
        return full, num_layers - full

    @property
    def granularity_of_kept(self) -> Recompute:
        return "none" if self.granularity == "full" else self.granularity


def offload_of(role: Any) -> OffloadChoice:
    """Of an actor's, critic's or reference's options."""
    return OffloadChoice(
        weights=bool(getattr(role, "offload_weights", False) or getattr(role, "offload", False)),
        gradients=bool(getattr(role, "offload_gradients", False)),
        optimizer=bool(getattr(role, "offload_optimizer", False)),
    )


def recompute_of(role: Any) -> RecomputeChoice:
    """Of a role's options; a reference is never trained."""
    found = getattr(role, "recompute", "none")
    if isinstance(found, str):
        return RecomputeChoice(granularity=found)  # type: ignore[arg-type]
    return RecomputeChoice(
        granularity=found.granularity, num_layers=int(getattr(found, "num_layers", 0))
    )
