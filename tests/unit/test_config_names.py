"""Unknown keys that are known from elsewhere: former names, and those of other trainers."""

import pytest

from rlhf_megatron.config import Config, load_config
from rlhf_megatron.config_names import ELSEWHERE, RENAMED
from rlhf_megatron.errors import ConfigError
from rlhf_megatron.loader import options_of


def problem_of(override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([], overrides=[override])
    (problem,) = caught.value.problems
    return problem


def test_the_tables_lead_to_keys_that_exist() -> None:
    options = options_of(Config)
    for name, found in ELSEWHERE.items():
        assert set(found.keys) <= set(options), name
        assert found.keys or found.remark, name
        assert name not in options, f"{name} is a key of its own"
    assert set(RENAMED.values()) <= set(options)
    assert not set(RENAMED) & set(options), "a key that exists cannot have been renamed"
    assert len(ELSEWHERE) > 100


@pytest.mark.parametrize("name", ELSEWHERE)
def test_every_name_is_answered(name: str) -> None:
    """Unless its last part is the name of a key here, to which a wrong path then leads."""
    found = ELSEWHERE[name]
    problem = problem_of(f"{name}=1")
    assert problem.startswith(f"{name}: unknown key; ")
    if found.keys:
        assert any(f"mean {key}" in problem for key in found.keys), problem
    assert found.remark in problem
    assert found.trainers in problem


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("actor_rollout_ref.rollout.n=4", ["mean rollout.responses_per_prompt?", "(n of verl)"]),
        ("critic.optim.lr=1e-5", ["did you mean critic.optimizer.learning_rate? (lr of verl"]),
        ("trainer.ppo.gae_lambda=1", ["did you mean ppo.gae_lambda?"]),
        ("n-samples-per-prompt=4", ["rollout.responses_per_prompt", "OpenRLHF"]),
        ("ppo.ppo_mini_batch_size=4", ["ppo.mini_batch_samples", "where verl counts prompts"]),
        ("trainer.nnodes=8", ["verl has it", "torchrun or srun"]),
        ("rollout.weights=reshard", ["it is now rollout.weight_update; write that"]),
        ("ppo.gama=1", ["did you mean ppo.gamma?"]),  # a typing error is one
        ("ppo.learning_rate=1", [".learning_rate?"]),
    ],
)
def test_answers(override: str, parts: list[str]) -> None:
    problem = problem_of(override)
    for part in [*parts, "(command line)"]:
        assert part in problem, problem


def test_what_follows_from_the_missing_value_is_no_news() -> None:
    """A prompt file under another trainer's name: no second line that data.prompts is not set."""
    from rlhf_megatron.validation import load_and_validate

    given = ["run.output_dir=x", "actor.model=m", "reward.function=a.py:f", "train_files=p.jsonl"]
    with pytest.raises(ConfigError) as caught:
        load_and_validate([], overrides=given, world_size=1, check_paths=False)
    assert len(caught.value.problems) == 1
