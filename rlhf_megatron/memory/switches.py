"""Keys that decide what is kept where, read from a role's options in one place."""

from dataclasses import dataclass

from rlhf_megatron.memory.activations import Recompute
from rlhf_megatron.models.config import ActorConfig, CriticConfig, ReferenceConfig


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
    """With "full": the layers of a (virtual) stage that are recomputed, the others keep all; 0:
    all."""
    kept_logits_bytes: int = 0
    """Logits of a micro-batch are kept where they take no more."""

    def split(self, num_layers: int, *, chunks: int = 1) -> tuple[int, int]:
        """Of a stage's layers in `chunks` virtual stages, those recomputed whole, and the rest."""
        if self.granularity != "full":
            return 0, num_layers
        full = min(chunks * self.num_layers or num_layers, num_layers)
        return full, num_layers - full

    @property
    def granularity_of_kept(self) -> Recompute:
        return "none" if self.granularity == "full" else self.granularity


def offload_of(role: ActorConfig | CriticConfig | ReferenceConfig) -> OffloadChoice:
    """Of a role's options."""
    if isinstance(role, ReferenceConfig):
        return OffloadChoice(weights=role.offload)
    return OffloadChoice(
        weights=role.offload_weights,
        gradients=role.offload_gradients,
        optimizer=role.offload_optimizer,
    )


def recompute_of(role: ActorConfig | CriticConfig) -> RecomputeChoice:
    """Of a trained role's options."""
    return RecomputeChoice(
        granularity=role.recompute.granularity,  # type: ignore[arg-type]
        num_layers=role.recompute.num_layers,
        kept_logits_bytes=int(role.kept_logits_gb * 1e9) if isinstance(role, ActorConfig) else 0,
    )
