"""What each role's model is. Imports no torch: a bad model directory is refused at once."""

from dataclasses import dataclass

from rlhf_megatron.config import Config
from rlhf_megatron.errors import ConfigError
from rlhf_megatron.layout.architecture import ModelArchitecture, read_architecture
from rlhf_megatron.validation_model import validate_model


@dataclass(frozen=True, kw_only=True)
class Architectures:
    """The numbers of the roles' models."""

    actor: ModelArchitecture
    critic: ModelArchitecture
    ref: ModelArchitecture | None  # None without a KL penalty


def read_architectures(config: Config) -> Architectures:
    """Read the roles' models and check them against the configuration.

    Raises UserError for an unreadable or unsupported model, ConfigError with all rules broken.
    """
    actor = read_architecture(config.actor.model)
    critic = read_architecture(config.critic.model) if config.critic.model else actor
    ref = None
    if config.ppo.kl.place != "off":
        ref = read_architecture(config.ref.model) if config.ref.model else actor
    problems = validate_model(config, actor=actor, critic=critic, ref=ref)
    if actor.head != "lm":
        problems.append(
            f"actor.model={config.actor.model}: a classification model cannot generate; give a "
            "language model (a reward model's head is for critic.model or reward.model)"
        )
    if problems:
        raise ConfigError(problems)
    return Architectures(actor=actor, critic=critic, ref=ref)
