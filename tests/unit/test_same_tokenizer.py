"""A critic with a tokenizer of its own: equal ones go, others are refused by what differs."""

import json
import shutil
from pathlib import Path

import pytest
from bad_configs import MODEL
from test_tokenizer import make_directory

from rlhf_megatron.config import Config
from rlhf_megatron.data.same_tokenizer import check_same_tokenizers
from rlhf_megatron.dry_run import describe
from rlhf_megatron.errors import ConfigError


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two directories with one tokenizer."""
    actor, critic = make_directory(tmp_path / "actor"), tmp_path / "critic"
    shutil.copytree(actor, critic)
    return actor, critic


def config_of(actor: Path, critic: Path | str, *, ref: Path | str = "") -> Config:
    config = Config()
    config.actor.model, config.critic.model, config.ref.model = str(actor), str(critic), str(ref)
    return config


def edit(path: Path, **changes) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(content), encoding="utf-8")


def swap_ids(directory: Path, first: str, second: str) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content), encoding="utf-8")


def refusal(config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        check_same_tokenizers(config)
    return str(caught.value)


def test_equal_tokenizers_go(pair: tuple[Path, Path]) -> None:
    actor, critic = pair
    check_same_tokenizers(config_of(actor, critic, ref=critic))
    # The same in another spelling, so that both are loaded.
    path = critic / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")), indent=1))
    edit(critic / "tokenizer_config.json", pad_token="<unk>", model_max_length=5)
    check_same_tokenizers(config_of(actor, critic))


def test_two_ids_swapped_are_found_by_the_first(pair: tuple[Path, Path]) -> None:
    actor, critic = pair
    swap_ids(critic, "c", "x")  # of the same size: the architectures do not tell
    text = refusal(config_of(actor, critic))
    assert f"critic.model={critic}: its tokenizer must equal that of actor.model={actor}" in text
    assert "the token 'c' has the id 6, and there has the id 27" in text
    assert "take a model with the same tokenizer" in text


def test_a_token_more_is_found(pair: tuple[Path, Path]) -> None:
    actor, critic = pair
    path = critic / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    number = len(content["model"]["vocab"])
    content["model"]["vocab"]["new"] = number
    path.write_text(json.dumps(content), encoding="utf-8")
    text = refusal(config_of(actor, critic))
    assert f"the token 'new' does not exist, and there has the id {number}" in text
    assert f"({number} tokens, and there {number + 1})" in text


def test_another_end_of_text_is_found(pair: tuple[Path, Path]) -> None:
    actor, critic = pair
    edit(critic / "tokenizer_config.json", eos_token="<unk>")
    assert "the token that ends a text has the id 2, and there 3" in refusal(
        config_of(actor, critic)
    )


def test_both_roles_are_named_and_data_tokenizer_counts(pair: tuple[Path, Path]) -> None:
    actor, other = pair
    swap_ids(other, "a", "b")
    config = config_of(actor, other, ref=other)
    text = refusal(config)
    assert "critic.model=" in text and "ref.model=" in text
    config.data.tokenizer = str(other)  # what the run reads, whatever the actor's directory has
    check_same_tokenizers(config)


def test_no_tokenizer_is_no_other_one(pair: tuple[Path, Path], tmp_path: Path) -> None:
    actor, _ = pair
    (tmp_path / "weights_alone").mkdir()
    check_same_tokenizers(config_of(actor, tmp_path / "weights_alone"))
    check_same_tokenizers(config_of(actor, tmp_path / "not_here"))
    check_same_tokenizers(config_of(tmp_path / "not_here", actor))


def test_the_dry_run_refuses_too(pair: tuple[Path, Path]) -> None:
    actor, critic = pair
    for directory in pair:
        (directory / "config.json").write_text(json.dumps(MODEL))
    config = config_of(actor, critic)
    config.run.output_dir, config.data.prompts = "runs/x", "prompts.jsonl"
    assert "critic" in describe(config, world_size=1)
    swap_ids(critic, "c", "x")
    with pytest.raises(ConfigError, match="'c' has the id 6"):
        describe(config, world_size=1)
