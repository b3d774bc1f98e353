"""Which ranks hold which role, as all ranks know it: integers only.

placement = role_placement(config, world_size=8)
placement.ranks["critic"]       # (4, 5, 6, 7)
placement.is_split              # True
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_megatron.config import Config
from rlhf_megatron.layout.parallel import parse_ranks
from rlhf_megatron.placement_config import ROLES, ranks_text
from rlhf_megatron.resolve import rollout_ranks

SIDE_BY_SIDE = frozenset(
    {
        "rollout",
        "reward",
        "log_prob",
        "ref_log_prob",
        "value",
        "update_critic",
        "update_actor",
        "reshard",
        "evaluation_rollout",
        "evaluation_reward",
    }
)
"""Phases that only the ranks of a role enter where the placement is split."""


@dataclass(frozen=True, kw_only=True)
class RolePlacement:
    """The ranks of each role of a run."""

    world_size: int
    ranks: Mapping[str, tuple[int, ...]]
    """Role (of ROLES) -> its global ranks, ascending. `ref` is missing where there is none,
    `critic` where it is a head on the actor."""

    @property
    def is_split(self) -> bool:
        """Whether some rank is without one of the roles."""
        return any(not self.is_everywhere(role) for role in self.ranks)

    def is_everywhere(self, role: str) -> bool:
        return len(self.ranks[role]) == self.world_size

    def outside(self, role: str) -> tuple[int, ...]:
        """The ranks without the role."""
        return tuple(sorted(set(range(self.world_size)) - set(self.ranks[role])))

    def share_ranks(self, role: str, other: str) -> bool:
        """Whether any rank has both."""
        return not set(self.ranks.get(role, ())).isdisjoint(self.ranks[other])

    @property
    def sync_ranks(self) -> tuple[int, ...]:
        """Those with a part in the weight sync: the actor's and the engines'."""
        return tuple(sorted({*self.ranks["actor"], *self.ranks["rollout"]}))

    @property
    def phases_apart(self) -> frozenset[str]:
        """Phases that ranks are in side by side, each with its own roles; none where all ranks have
        all roles."""
        return SIDE_BY_SIDE if self.is_split else frozenset()


def role_placement(config: Config, *, world_size: int) -> RolePlacement:
    """Of a valid configuration."""
    found = {
        role: parse_ranks(ranks_text(config, role=role), default=range(world_size))
        for role in ROLES
        if role != "rollout"
        and (role != "ref" or config.ppo.kl.place != "off")
        and (role != "critic" or not config.critic.shared_backbone)
    }
    found["rollout"] = rollout_ranks(config, world_size=world_size)
    return RolePlacement(world_size=world_size, ranks=found)
