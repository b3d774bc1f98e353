"""Rules of the roles' precisions and layers."""

from collections.abc import Iterator

from rlhf_megatron.config import Config
from rlhf_megatron.loader import show
from rlhf_megatron.models.config import ActorConfig, CriticConfig, ReferenceConfig


def precision_problems(config: Config) -> Iterator[str]:
    """Of the Megatron models."""
    roles: dict[str, ActorConfig | CriticConfig | ReferenceConfig] = {
        "actor": config.actor,
        "critic": config.critic,  # of a head on the actor, what is set is held against the actor
    }
    if config.ppo.kl.place != "off":  # otherwise there is no reference
        roles["ref"] = config.ref
    for role, options in roles.items():
        if options.precision != config.actor.precision:
            yield (
                f"{role}.precision={options.precision}: must equal "
                f"actor.precision={config.actor.precision}, since the roles exchange tensors; "
                f"set {role}.precision={config.actor.precision}"
            )
        if options.layer_spec == "transformer_engine" and config.distributed.device == "cpu":
            yield (
                f"{role}.layer_spec={options.layer_spec}: needs a GPU, and "
                "distributed.device=cpu; take local or auto"
            )
        yield from _fp8(role, options=options)
    if "ref" in roles and config.ref.fp8 != config.actor.fp8:
        wanted = show(config.actor.fp8)
        yield (
            f"ref.fp8={show(config.ref.fp8)}: must equal actor.fp8={wanted}, or the KL penalty "
            f"would measure rounding; set ref.fp8={wanted}"
        )


def _fp8(role: str, *, options: ActorConfig | CriticConfig | ReferenceConfig) -> Iterator[str]:
    if not options.fp8:
        return
    if options.precision != "bf16":
        yield (
            f"{role}.fp8=true: goes with precision bf16 (weights and what is not multiplied), and "
            f"{role}.precision={options.precision}; set one of the two"
        )
    if options.layer_spec != "transformer_engine":
        yield (
            f"{role}.fp8=true: needs Transformer Engine's layers, and "
            f"{role}.layer_spec={options.layer_spec}; set {role}.layer_spec=transformer_engine"
        )
