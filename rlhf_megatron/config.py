"""The tree of configs, and how it is loaded.

Each part's dataclass is declared in the `config.py` of the room that uses it; this file joins them.
`loader` reads files and overrides, `validation` holds the rules that span several keys.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from rlhf_megatron.algorithms.config import PpoConfig
from rlhf_megatron.checkpoint.config import CheckpointConfig, ExportConfig
from rlhf_megatron.data.config import DataConfig, EvaluationConfig, WarmupConfig
from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.doctor.config import DoctorConfig
from rlhf_megatron.errors import ConfigError
from rlhf_megatron.faults_config import FaultsConfig
from rlhf_megatron.loader import Loaded, load
from rlhf_megatron.models.config import ActorConfig, CriticConfig, ReferenceConfig
from rlhf_megatron.observability.config import LoggingConfig, ProfileConfig
from rlhf_megatron.placement_config import PipelineConfig, apply_placement
from rlhf_megatron.reshard.config import ParityConfig, ReshardConfig
from rlhf_megatron.rewards.config import RewardConfig
from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.schema import items, number
from rlhf_megatron.secret_values import Secrets


@dataclass(kw_only=True)
class RunConfig:
    """The run as a whole."""

    name: str = "ppo"
    """Name of the run in logs and trackers."""

    output_dir: str = ""
    """Folder for everything the run writes. Required. Made if missing; a folder that already holds
    a run's metrics.jsonl is refused unless overwrite is set."""

    overwrite: bool = False
    """Move an existing run in output_dir aside (to output_dir.old-N) and start afresh."""

    steps: int = number(100, minimum=0)
    """PPO steps. 0 only prepares, evaluates and exports."""

    seed: int = number(1, minimum=0)
    """Seed of everything: data order, sampling, initialisation of the value head."""

    trust_remote_code: bool = False
    """Let transformers and vLLM run Python code that the directories of actor.model, critic.model,
    ref.model or data.tokenizer bring with them (auto_map in their configurations). Default false:
    such a directory is refused. That of reward.model has reward.trust_remote_code."""


@dataclass(kw_only=True)
class Config:
    """The whole configuration of a training run."""

    run: RunConfig = items(RunConfig)
    placement: list[dict[str, Any]] = items()
    """Groups of ranks and the roles on them, such as [{ranks: 0-3, roles: [actor, ref, rollout]},
    {ranks: 4-7, roles: [critic]}]. Roles: actor, critic, ref, reward, rollout. It sets the roles'
    own ranks; a role that it does not name keeps those (all, and rollout the actor's). Empty
    (default): every rank has every role."""
    data: DataConfig = items(DataConfig)
    evaluation: EvaluationConfig = items(EvaluationConfig)
    warmup: WarmupConfig = items(WarmupConfig)
    actor: ActorConfig = items(ActorConfig)
    critic: CriticConfig = items(CriticConfig)
    ref: ReferenceConfig = items(ReferenceConfig)
    reward: RewardConfig = items(RewardConfig)
    rollout: RolloutConfig = items(RolloutConfig)
    pipeline: PipelineConfig = items(PipelineConfig)
    ppo: PpoConfig = items(PpoConfig)
    reshard: ReshardConfig = items(ReshardConfig)
    parity: ParityConfig = items(ParityConfig)
    checkpoint: CheckpointConfig = items(CheckpointConfig)
    export: ExportConfig = items(ExportConfig)
    faults: FaultsConfig = items(FaultsConfig)
    doctor: DoctorConfig = items(DoctorConfig)
    logging: LoggingConfig = items(LoggingConfig)
    profile: ProfileConfig = items(ProfileConfig)
    distributed: DistributedConfig = items(DistributedConfig)

    def __post_init__(self) -> None:
        self.secrets = Secrets()  # no option: what of the values above must not be shown


def load_config(paths: Sequence[str], *, overrides: Sequence[str] = ()) -> Config:
    """The YAML files merged in order, then the `key.path=value` overrides, onto the tree above.

    Raises ConfigError with all problems at once: unknown keys, types, bounds, choices, files.
    `validation.load_and_validate` adds the rules that span several keys to the same message.
    """
    loaded = read_config(paths, overrides=overrides)
    if loaded.problems:
        raise ConfigError(loaded.problems)
    return loaded.config


def read_config(paths: Sequence[str], *, overrides: Sequence[str] = ()) -> Loaded[Config]:
    """The same without an error: the problems are in what it returns."""
    loaded = load(Config, paths=paths, overrides=overrides)
    loaded.config.secrets = loaded.secrets
    if "placement" not in loaded.faulty_keys:
        found = apply_placement(loaded.config)
        loaded.problems += found
        loaded.faulty_keys |= {"placement"} if found else set()
    return loaded


def plain_config(config: Config) -> dict[str, Any]:
    """The configuration as plain JSON values, secrets hidden: for whatever is saved or shown."""
    found = OmegaConf.to_container(OmegaConf.structured(config))
    plain: dict[str, Any] = json.loads(json.dumps(config.secrets.hide_in(found)))
    return plain


def resolved_yaml(config: Config) -> str:
    """The whole configuration as YAML, defaults included; loading it gives `config` again.

    Secrets are hidden: those from the environment load again where the variable is set, one that
    was written out has to be given anew."""
    return OmegaConf.to_yaml(OmegaConf.create(plain_config(config)))
