"""The shared backbone: a critic that is a second head on the actor (critic.shared_backbone).

One forward pass gives log-probs and values, one backward pass the gradient of both losses, and the
actor's optimizer takes the step. There is no critic model, optimizer, phase or checkpoint folder.
Nothing here imports torch.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from rlhf_megatron.config import Config
from rlhf_megatron.layout.tensors import Head
from rlhf_megatron.loader import show
from rlhf_megatron.models.config import ActorConfig, CriticConfig

_OWN = frozenset({"shared_backbone", "shared_loss_weight"})
_LIKE_ACTOR = ("precision", "layer_spec", "fp8", "parallel.")
"""Keys that may be set, as a configuration for two models sets them, to what the actor has."""
_REASONS = {
    "model": "the critic is a head on the actor's model",
    "optimizer.": "actor.optimizer trains the head",
    "recompute.": "actor.recompute holds for the one backward pass",
    "offload_": "the head is a part of the actor",
}


def trained_roles(config: Config) -> dict[str, ActorConfig | CriticConfig]:
    """The roles with a model and an optimizer of their own."""
    roles: dict[str, ActorConfig | CriticConfig] = {"actor": config.actor}
    if not config.critic.shared_backbone:
        roles["critic"] = config.critic
    return roles


def actor_head(config: Config) -> Head:
    """What the actor's model ends in."""
    return "joint" if config.critic.shared_backbone else "lm"


def shared_loss_weight(config: Config) -> float | None:
    """The weight of the value loss in the actor's updates; None where the critic has its own."""
    return config.critic.shared_loss_weight if config.critic.shared_backbone else None


def refused_shared_backbone(config: Config) -> Iterator[str]:
    """Keys that have no meaning with, or without, a shared backbone."""
    critic, default = config.critic, CriticConfig()
    if not critic.shared_backbone:
        if critic.shared_loss_weight != default.shared_loss_weight:
            yield (
                f"critic.shared_loss_weight={critic.shared_loss_weight}: weighs the loss of a head "
                "on the actor, and critic.shared_backbone=false; set that to true, or leave the "
                f"weight at {default.shared_loss_weight}"
            )
        return
    actor = _flat(config.actor)
    usual = _flat(default)
    for name, value in _flat(critic).items():
        if name in _OWN or value == usual[name]:
            continue
        at = f"critic.{name}={show(value)}"
        if name.startswith(_LIKE_ACTOR):
            if value != actor[name] and name != "precision":  # which has a rule of its own
                yield (
                    f"{at}: with critic.shared_backbone=true the critic runs in the actor's "
                    f"passes, where actor.{name}={show(actor[name])}; set that, leave it out, or "
                    "set critic.shared_backbone=false"
                )
            continue
        reason = next(text for start, text in _REASONS.items() if name.startswith(start))
        yield (
            f"{at}: with critic.shared_backbone=true {reason}; leave it at "
            f"'{show(usual[name])}', or set critic.shared_backbone=false"
        )
    if config.ppo.critic_warmup_steps > 0:
        yield (
            f"ppo.critic_warmup_steps={config.ppo.critic_warmup_steps}: with "
            "critic.shared_backbone=true each update is of both heads, and the critic cannot be "
            "trained alone; set 0, or critic.shared_backbone=false"
        )


def _flat(section: Any, *, prefix: str = "") -> dict[str, Any]:
    """Names within the section -> values."""
    found: dict[str, Any] = {}
    for item in fields(section):
        value = getattr(section, item.name)
        if is_dataclass(value):
            found |= _flat(value, prefix=f"{prefix}{item.name}.")
        else:
            found[prefix + item.name] = value
    return found
