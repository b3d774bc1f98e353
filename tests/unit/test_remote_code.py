"""Directories that bring code: refused by name, and nothing of it runs. Each plant would write a
file, and does where it is trusted."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rewards import make_reward_model, save_tokenizer

from rlhf_megatron.checkpoint.hf_files import open_weight_files
from rlhf_megatron.config import Config
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.remote_code import code_of
from rlhf_megatron.rewards.model import ModelScorer
from rlhf_megatron.rollout.config import refused_engine_args
from rlhf_megatron.validation import validate_paths


def plant_code(folder: Path, *, kind: str, proof: Path) -> None:
    """Python files that write `proof` when they are imported, named by a configuration."""
    lines = f"from pathlib import Path\nPath({str(proof)!r}).write_text('ran')\n"
    (folder / "planted.py").write_text(
        lines + "from transformers import LlamaConfig, PreTrainedTokenizerFast\n"
        "class PlantedConfig(LlamaConfig):\n    model_type = 'planted'\n"
        "class PlantedTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    if kind == "tokenizer":
        path = folder / "tokenizer_config.json"
        change: dict[str, Any] = {
            "auto_map": {"AutoTokenizer": [None, "planted.PlantedTokenizer"]},
            "tokenizer_class": "PlantedTokenizer",
        }
    else:
        path = folder / "config.json"
        change = {"auto_map": {"AutoConfig": "planted.PlantedConfig"}, "model_type": "planted"}
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.fixture
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    return tmp_path / "proof"


def test_a_tokenizer_with_code(tmp_path: Path, proof: Path) -> None:
    save_tokenizer(tmp_path / "model")
    plant_code(tmp_path / "model", kind="tokenizer", proof=proof)
    with pytest.raises(UserError, match="cannot be read as a Hugging Face tokenizer"):
        load_tokenizer(tmp_path / "model")
    assert not proof.exists()
    load_tokenizer(tmp_path / "model", trust_remote_code=True)
    assert proof.exists()  # so the plant is a real one


def test_a_reward_model_with_code(tmp_path: Path, proof: Path) -> None:
    path = make_reward_model(tmp_path / "rm", pad_token_id=0)
    plant_code(path, kind="model", proof=proof)
    with pytest.raises(UserError, match="trust_remote_code"):
        ModelScorer(path, device=torch.device("cpu"))
    assert not proof.exists()
    with pytest.raises(UserError):  # its class is no model that transformers knows
        ModelScorer(path, device=torch.device("cpu"), trust_remote_code=True)
    assert proof.exists()


class Bomb:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self.proof),)


def test_pickled_weights_run_nothing(tmp_path: Path, proof: Path) -> None:
    path = make_reward_model(tmp_path / "rm", pad_token_id=0)
    (path / "model.safetensors").unlink()
    torch.save({"score.weight": Bomb(proof)}, path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"reward\.model=.*is not unpickled"):
        ModelScorer(path, device=torch.device("cpu"), trust_remote_code=True)
    assert "truncated or damaged" in open_weight_files(path).problems[0]
    assert not proof.exists()
    pickle.loads(pickle.dumps(Bomb(proof)))
    assert proof.exists()


def config_of(folder: Path) -> Config:
    config = Config()
    config.actor.model = config.reward.model = config.data.tokenizer = str(folder)
    return config


def test_the_configuration_refuses_each_such_directory_by_name(tmp_path: Path, proof: Path) -> None:
    path = make_reward_model(tmp_path / "model", pad_token_id=0)
    assert code_of(path) == [] and validate_paths(config_of(path)) == []
    plant_code(path, kind="model", proof=proof)
    plant_code(path, kind="tokenizer", proof=proof)
    (path / "custom_generate").mkdir()
    (path / "custom_generate" / "generate.py").write_text("")
    named = "config.json: auto_map.AutoConfig=planted.PlantedConfig, tokenizer_config.json: "
    problems = validate_paths(config_of(path))
    assert [p.partition("=")[0] for p in problems] == [
        "actor.model",
        "reward.model",
        "data.tokenizer",
    ]
    assert all(f"brings code of its own ({named}" in problem for problem in problems)
    assert all("custom_generate/generate.py), which is not run" in p for p in problems)
    assert problems[0].endswith("set run.trust_remote_code=true")
    assert problems[1].endswith("set reward.trust_remote_code=true")
    config = config_of(path)
    config.run.trust_remote_code = True
    assert [p.partition("=")[0] for p in validate_paths(config)] == ["reward.model"]
    config.reward.trust_remote_code = True
    assert validate_paths(config) == []
    assert not proof.exists()


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("{}", []),
        ("[1", []),
        ('{"auto_map": {}}', []),
        ('{"auto_map": {"AutoModel": ""}}', []),
        ('{"auto_map": "x.Y"}', ["config.json: auto_map=x.Y"]),
        (
            '{"text_config": [{"auto_map": {"AutoModel": "other--x.Y"}}]}',
            ["config.json: text_config.auto_map.AutoModel=other--x.Y"],
        ),
    ],
)
def test_where_code_is_named(tmp_path: Path, text: str, places: list[str]) -> None:
    (tmp_path / "config.json").write_text(text)
    assert code_of(tmp_path) == places and code_of(tmp_path / "none") == []


def test_vllm_is_not_told_past_the_configuration() -> None:
    (problem,) = refused_engine_args({"trust_remote_code": True})
    assert "set run.trust_remote_code instead" in problem
