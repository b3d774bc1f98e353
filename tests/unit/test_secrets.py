"""Secrets are used, and never shown: not in messages, files, logs, nor by a resumed run."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from rlhf_megatron.config import (
    Config,
    load_config,
    plain_config,
    read_config,
    resolved_yaml,
)
from rlhf_megatron.errors import ConfigError
from rlhf_megatron.loader import load
from rlhf_megatron.observability.logs import LOGGER_NAME, setup_logging
from rlhf_megatron.resume import _changes, _refused
from rlhf_megatron.schema import items, number, secret
from rlhf_megatron.secret_values import Secrets, find_secrets, is_secret_name
from rlhf_megatron.validation import load_and_validate

VALUE = "hunter2-hunter2"


@dataclass(kw_only=True)
class Remote:
    url: str = ""
    token: str = secret()


@dataclass(kw_only=True)
class Root:
    steps: int = number(1, minimum=0)
    name: str = ""
    remote: Remote = items(Remote)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_TEST_TOKEN", VALUE)
    monkeypatch.setenv("RLHF_TEST_PLAIN", "plain-value")


def shown(*overrides: str, paths: tuple[str, ...] = ()) -> str:
    """Everything that could be shown of a configuration and its problems."""
    loaded = load(Root, paths=paths, overrides=overrides)
    config = loaded.config
    tree = {"steps": config.steps, "name": config.name, "remote": vars(config.remote)}
    return json.dumps(loaded.secrets.hide_in(tree)) + "\n".join(loaded.problems) + repr(config)


@pytest.mark.parametrize(
    "override",
    [
        f"remote.token={VALUE}",
        "remote.token=${oc.env:RLHF_TEST_TOKEN}",
        "remote.token=Bearer ${oc.env:RLHF_TEST_TOKEN}",
        f"remote.token=[{VALUE}",
        f"remote.token='{VALUE}'",
        f"remote.token.inner={VALUE}",
        f"remote.tokn={VALUE}",
        "remote={token: [" + VALUE + "]}",
        "steps=${oc.env:RLHF_TEST_TOKEN}",
        "steps=${remote.token}",
    ],
)
def test_no_way_of_giving_a_secret_shows_it(override: str) -> None:
    extra = [] if "remote.token=" in override else ["remote.token=${oc.env:RLHF_TEST_TOKEN}"]
    if override.startswith("remote={"):
        extra = []
    assert VALUE not in shown(*extra, override)


def test_the_value_itself_is_used() -> None:
    loaded = load(Root, paths=[], overrides=["remote.token=${oc.env:RLHF_TEST_TOKEN}"])
    assert loaded.config.remote.token == VALUE
    assert loaded.problems == []


def test_values_of_secret_variables_are_hidden_wherever_they_end_up() -> None:
    config = load_config(
        [],
        overrides=[
            "run.name=x-${oc.env:RLHF_TEST_TOKEN}",
            "rollout.engine_args={hf_token: '${run.name}', list: ['${oc.env:RLHF_TEST_TOKEN}']}",
            "critic.model=${oc.env:RLHF_TEST_PLAIN}",
        ],
    )
    assert config.run.name == f"x-{VALUE}"
    plain = plain_config(config)
    assert VALUE not in json.dumps(plain)
    assert plain["run"]["name"] == "x-${oc.env:RLHF_TEST_TOKEN}"
    assert plain["rollout"]["engine_args"]["hf_token"] == "x-${oc.env:RLHF_TEST_TOKEN}"
    assert plain["critic"]["model"] == "plain-value"


def test_a_name_that_is_computed_is_hidden_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config([], overrides=["run.name=${oc.env:${data.prompt_field}_X,none}"])
    assert config.run.name == "none"
    config = load_config(
        [],
        overrides=["data.prompt_field=RLHF_TEST", "run.name=${oc.env:${data.prompt_field}_TOKEN}"],
    )
    assert config.run.name == VALUE
    assert VALUE not in resolved_yaml(config)


def test_the_saved_configuration_loads_again(tmp_path: Path) -> None:
    config = load_config([], overrides=["run.name=${oc.env:RLHF_TEST_TOKEN}"])
    saved = tmp_path / "config.yaml"
    saved.write_text(resolved_yaml(config))
    assert VALUE not in saved.read_text()
    assert yaml.safe_load(saved.read_text())["run"]["name"] == "${oc.env:RLHF_TEST_TOKEN}"
    again = load_config([str(saved)])
    assert again == config
    assert resolved_yaml(again) == saved.read_text()


def test_a_hidden_secret_has_to_be_given_again(tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text("remote: {token: '***'}\n")
    loaded = load(Root, paths=[str(saved)], overrides=[])
    (problem,) = loaded.problems
    assert problem.startswith("remote.token=***: a saved configuration does not hold it; give it")
    assert "'${oc.env:NAME}'" in problem
    assert "line 1" in problem
    assert load(Root, paths=[str(saved)], overrides=["remote.token=abcd"]).problems == []


def test_a_missing_variable_is_one_problem_with_its_key() -> None:
    loaded = load(Root, paths=[], overrides=["remote.token=${oc.env:RLHF_TEST_NO_TOKEN}"])
    (problem,) = loaded.problems
    assert problem.startswith("remote.token=${oc.env:RLHF_TEST_NO_TOKEN}: ")
    assert "'RLHF_TEST_NO_TOKEN' not found" in problem
    assert "export it" in problem


def test_problems_between_keys_hide_secrets() -> None:
    given = ["run.output_dir=x", "actor.model=m", "data.prompts=p", "reward.function=a.py:f"]
    with pytest.raises(ConfigError) as caught:
        load_and_validate(
            [], overrides=[*given, "reward.model=${oc.env:RLHF_TEST_TOKEN}"], world_size=1
        )
    assert VALUE not in str(caught.value)
    assert "reward.model=${oc.env:RLHF_TEST_TOKEN}" in str(caught.value)


def test_a_resumed_run_compares_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["reward.function=${oc.env:RLHF_TEST_TOKEN}"]
    written = json.loads(json.dumps(plain_config(load_config([], overrides=given))))
    assert VALUE not in json.dumps(written)
    monkeypatch.setenv("RLHF_TEST_TOKEN", "renewed-token")  # tokens expire: that is no change
    assert list(_changes(written, config=load_config([], overrides=given))) == []
    other = load_config([], overrides=["reward.function=a.py:f", "run.seed=2"])
    (change,) = _changes(written, config=other)
    assert change == "reward.function changed since: ${oc.env:RLHF_TEST_TOKEN} -> a.py:f"
    assert list(_refused(written, config=other)) == ["run.seed: 1 -> 2"]


def test_logs_hide_secrets_also_in_tracebacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config([], overrides=["run.name=${oc.env:RLHF_TEST_TOKEN}"])
    logger = setup_logging(tmp_path, rank=0, hide=config.secrets.hide)
    try:
        raise RuntimeError(f"refused: token={VALUE}&x=1")
    except RuntimeError:
        logging.getLogger(f"{LOGGER_NAME}.rewards").exception("endpoint %s", VALUE)
    for handler in logger.handlers:
        handler.flush()
    text = (tmp_path / "logs" / "rank_0000.log").read_text() + capsys.readouterr().err
    assert VALUE not in text
    assert "endpoint ${oc.env:RLHF_TEST_TOKEN}" in text
    assert "token=${oc.env:RLHF_TEST_TOKEN}&x=1" in text
    setup_logging(tmp_path, rank=1)


def test_short_and_nested_values() -> None:
    secrets = Secrets({"a": "***", "abcdef": "${oc.env:LONG}", "abcd": "***"})
    assert secrets.hide("a") == "***"
    assert secrets.hide("a cat") == "a cat"
    assert secrets.hide("xabcdefx abcd") == "x${oc.env:LONG}x ***"
    assert secrets.hide_in({"a": [1, None, True, "abcd"]}) == {"a": [1, None, True, "***"]}
    assert "abcdef" not in repr(secrets)


def test_names_of_variables() -> None:
    assert all(map(is_secret_name, ("HF_TOKEN", "WANDB_API_KEY", "my_secret", "DB_PASSWORD")))
    assert not any(map(is_secret_name, ("HOME", "SLURM_JOB_ID", "MODEL_DIR")))
    found = find_secrets(
        [("${oc.env:MODEL_DIR}", False), ("${ oc.env : HF_TOKEN , x}", False)],
        resolved=["", "literal"],
        environment={"MODEL_DIR": "m", "HF_TOKEN": "t0ken", "OTHER_KEY": "unused"},
    )
    assert dict(found.shown) == {"t0ken": "${oc.env:HF_TOKEN}", "literal": "***"}
    # Any variable in a secret key is a secret, whatever it is called.
    found = find_secrets(
        [("${oc.env:REWARD_LOGIN}", True)], resolved=[], environment={"REWARD_LOGIN": "abcd"}
    )
    assert found.hide("abcd") == "${oc.env:REWARD_LOGIN}"


def test_a_configuration_without_secrets_is_saved_as_it_is() -> None:
    assert read_config([]).config.secrets == Secrets()
    assert load_config([]) == Config()
