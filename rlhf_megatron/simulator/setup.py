"""What is simulated: a configuration on a machine, with the lengths that its batches have."""

from dataclasses import dataclass

from rlhf_megatron.config import Config
from rlhf_megatron.errors import ConfigError, UserError
from rlhf_megatron.layout.parallel import parse_ranks
from rlhf_megatron.memory.plan import RoleModels, role_settings
from rlhf_megatron.memory.roles import RoleSetting
from rlhf_megatron.memory.rollout import engine_memory
from rlhf_megatron.resolve import rollout_ranks
from rlhf_megatron.simulator.cluster import Cluster

HALF = 0.5
"""Of the greatest lengths, where nothing is known: as the dry run counts."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Tokens of a step's samples."""

    prompt_tokens: float
    """Mean."""
    response_tokens: float
    """Mean."""
    longest_response_tokens: float
    """Of a step: what a rollout waits for."""

    @property
    def sample_tokens(self) -> float:
        return self.prompt_tokens + self.response_tokens


def workload_of(
    config: Config, *, prompt_tokens: float = 0.0, response_tokens: float = 0.0
) -> Workload:
    """Means as given, 0 for half of the greatest lengths; the longest is of the greatest length."""
    rollout = config.rollout
    return Workload(
        prompt_tokens=prompt_tokens or HALF * rollout.max_prompt_tokens,
        response_tokens=response_tokens or HALF * rollout.max_response_tokens,
        longest_response_tokens=rollout.max_response_tokens,
    )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All that the seconds of a step follow from."""

    config: Config
    models: RoleModels
    cluster: Cluster
    workload: Workload
    world_size: int
    roles: dict[str, RoleSetting]
    """actor, critic, and ref where there is one."""
    rollout_ranks: tuple[int, ...]
    reward_ranks: tuple[int, ...]
    sequences_at_once: int
    """That an engine's KV cache holds, at half the greatest length."""
    depth: int
    """pipeline.depth."""

    @property
    def num_samples(self) -> int:
        """Of a step."""
        return self.config.rollout.prompts_per_step * self.config.rollout.responses_per_prompt

    @property
    def engine_size(self) -> int:
        return self.config.rollout.tensor_parallel_size

    @property
    def num_engines(self) -> int:
        return len(self.rollout_ranks) // self.engine_size

    @property
    def ranks_of(self) -> dict[str, tuple[int, ...]]:
        """Role -> its ranks, rollout and reward among them."""
        found = {name: role.layout.ranks for name, role in self.roles.items()}
        return found | {"rollout": self.rollout_ranks, "reward": self.reward_ranks}

    @property
    def is_split(self) -> bool:
        """Whether some rank is without one of the roles, so that they meet in exchanges."""
        return any(len(ranks) < self.world_size for ranks in self.ranks_of.values())


def make_setup(
    config: Config,
    *,
    models: RoleModels,
    cluster: Cluster,
    world_size: int,
    workload: Workload | None = None,
    depth: int | None = None,
) -> Setup:
    """Raises UserError where a role's sizes do not fit its ranks, engines do not fill theirs, or
    the critic is a head on the actor."""
    if models.critic is None:
        raise ConfigError(
            [
                "critic.shared_backbone=true: the simulator knows the phases of two models; set "
                "critic.shared_backbone=false"
            ]
        )
    settings = role_settings(config, models=models, world_size=world_size)
    rolling = rollout_ranks(config, world_size=world_size)
    size = config.rollout.tensor_parallel_size
    if len(rolling) % size:
        raise ConfigError(
            [
                f"rollout.tensor_parallel_size={size}: must divide the {len(rolling)} ranks that "
                "roll out; give another size, or other rollout.ranks"
            ]
        )
    try:
        rewarding = parse_ranks(config.reward.parallel.ranks, default=range(world_size))
    except ValueError as error:
        raise UserError(f"reward.parallel.ranks={config.reward.parallel.ranks}: {error}") from None
    memory = cluster.memory_gb
    engine = engine_memory(
        config,
        arch=models.actor,
        world_size=world_size,
        gpu_memory_bytes=None if memory is None else int(memory * 1e9),
    )
    return Setup(
        config=config,
        models=models,
        cluster=cluster,
        workload=workload or workload_of(config),
        world_size=world_size,
        roles={setting.name: setting for setting in settings},
        rollout_ranks=rolling,
        reward_ranks=rewarding,
        sequences_at_once=max(1, engine.capacity.half_length_sequences),
        depth=config.pipeline.depth if depth is None else depth,
    )
