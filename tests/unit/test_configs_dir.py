"""Every file in configs/ loads, fits its documented world size and model, and says what it is."""

import re
from math import prod
from pathlib import Path

import pytest
from model_numbers import Numbers

from rlhf_megatron.resolve import describe_batch
from rlhf_megatron.validation import load_and_validate
from rlhf_megatron.validation_model import validate_model

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").glob("*.yaml"))

# The models that the files are written for, from their published config.json.
MODELS = {
    "quickstart_cpu": Numbers(
        num_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=128,
        ffn_hidden_size=256,
        vocab_size=99,
        max_position_embeddings=64,
    ),
    "arithmetic_smollm2_135m": Numbers(
        num_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        hidden_size=576,
        ffn_hidden_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
    ),
    "ppo_1b_1gpu": Numbers(
        num_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        hidden_size=2048,
        ffn_hidden_size=8192,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "ppo_8b_8gpu": Numbers(
        num_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        hidden_size=4096,
        ffn_hidden_size=14336,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "ppo_70b_64gpu": Numbers(
        num_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        hidden_size=8192,
        ffn_hidden_size=28672,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
}


def header_of(path: Path) -> str:
    """The comment that opens the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


def world_size_of(path: Path) -> int:
    found = re.search(r"^# world size: (\d+)$", header_of(path), flags=re.MULTILINE)
    assert found, f"{path.name}: the header has no line '# world size: N'"
    return int(found.group(1))


def test_the_shipped_files_are_found() -> None:
    assert {path.stem for path in FILES} >= set(MODELS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config_loads_and_validates(path: Path) -> None:
    world_size = world_size_of(path)
    config = load_and_validate([str(path)], world_size=world_size, check_paths=False)
    if path.stem in MODELS:
        assert validate_model(config, actor=MODELS[path.stem]) == []
    assert "samples per step" in describe_batch(config, world_size=world_size)
    file, _, name = config.reward.function.rpartition(":")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_header_says_command_cost_and_result(path: Path) -> None:
    header = header_of(path)
    for part in ("# Command", "# Cost:", "# Expect:", f"--config configs/{path.name}"):
        assert part in header, part
    counts = re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", header)
    assert prod(map(int, counts)) == world_size_of(path)
