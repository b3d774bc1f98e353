"""`placement` in words, and what it comes to: ranks by role, the table of the dry run."""

from pathlib import Path

import pytest
from bad_configs import GOOD

from rlhf_megatron.config import Config, read_config, resolved_yaml
from rlhf_megatron.placement_table import placement_lines
from rlhf_megatron.role_ranks import SIDE_BY_SIDE, role_placement
from rlhf_megatron.validation import validate

SPLIT = (
    "placement=[{ranks: 0-3, roles: [actor, ref, rollout]}, {ranks: 4-6, roles: [critic]}, "
    "{ranks: 7, roles: [reward]}]"
)


@pytest.fixture
def config_of(tmp_path: Path):
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)

    def load(*overrides: str) -> Config:
        found = read_config([str(path)], overrides=overrides)
        assert found.problems == []
        return found.config

    return load


def test_words_become_ranks(config_of):
    config = config_of(SPLIT, "critic.parallel.pipeline_model_parallel_size=3")
    assert validate(config, world_size=8) == []
    placement = role_placement(config, world_size=8)
    assert placement.ranks == {
        "actor": (0, 1, 2, 3),
        "critic": (4, 5, 6),
        "ref": (0, 1, 2, 3),
        "reward": (7,),
        "rollout": (0, 1, 2, 3),
    }
    assert placement.is_split and placement.phases_apart == SIDE_BY_SIDE
    assert placement.outside("critic") == (0, 1, 2, 3, 7)
    assert placement.share_ranks("actor", "rollout")
    assert not placement.share_ranks("critic", "rollout")
    assert placement.sync_ranks == (0, 1, 2, 3)


def test_by_default_all_ranks_have_all_roles(config_of):
    placement = role_placement(config_of("ppo.kl.place=off"), world_size=4)
    assert set(placement.ranks) == {"actor", "critic", "reward", "rollout"}
    assert set(placement.ranks.values()) == {(0, 1, 2, 3)}
    assert not placement.is_split and placement.phases_apart == frozenset()


def test_the_rollout_follows_the_actor(config_of):
    config = config_of("placement=[{ranks: '1,3', roles: [actor]}]")
    assert role_placement(config, world_size=4).ranks["rollout"] == (1, 3)


def test_a_saved_configuration_loads_again(config_of, tmp_path):
    config = config_of(SPLIT)
    saved = tmp_path / "saved.yaml"
    saved.write_text(resolved_yaml(config))
    again = read_config([str(saved)])
    assert again.problems == []
    assert again.config == config


def test_the_table(config_of):
    config = config_of(
        SPLIT,
        "critic.parallel.pipeline_model_parallel_size=3",
        "actor.parallel.tensor_model_parallel_size=2",
        "pipeline.depth=1",
        "ppo.importance_sampling.cap=2",
    )
    assert placement_lines(config, world_size=8) == [
        "  ranks 0-3: actor TP2 PP1 DP2, ref TP1 PP1 DP4, rollout 4 x TP1",
        "  ranks 4-6: critic TP1 PP3 DP1",
        "  rank 7:    reward x 1",
        "  pipeline.depth=1: the critic is updated while the next batch rolls out",
    ]
