"""Every file in configs/ plans in a dry run at its world size, and says what it is."""

import json
import re
import resource
import subprocess
import sys
from math import prod
from pathlib import Path

import pytest
from bad_configs import MODEL

from rlhf_megatron.architectures import find_model, read_architectures, stand_in_folders
from rlhf_megatron.config import load_config
from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.architecture import read_architecture_file
from rlhf_megatron.layout.sizes import num_parameters
from rlhf_megatron.simulator.cluster import read_cluster
from rlhf_megatron.validation import load_and_validate

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
PRESETS = sorted(CONFIGS.glob("*.yaml"))
PROFILES = sorted(CONFIGS.glob("profiles/*.yaml"))
CLUSTERS = sorted(CONFIGS.glob("clusters/*.yaml"))
MODELS = sorted(CONFIGS.glob("models/*/config.json"))

BILLIONS = {
    "Llama-2-13b": 13.02,
    "Llama-3.2-1B": 1.24,
    "Llama-3.1-8B": 8.03,
    "Qwen2.5-32B": 32.76,
    "Llama-3.3-70B": 70.55,
    "Llama-3.1-405B": 405.85,
    "smollm2-135m-instruct": 0.13,
}
"""Parameters as the models' cards state them."""


def header_of(path: Path) -> str:
    """The comment that opens the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


def world_size_of(path: Path) -> int:
    found = re.search(r"^# world size: (\d+)$", header_of(path), flags=re.MULTILINE)
    assert found, f"{path.name}: the header has no line '# world size: N'"
    return int(found.group(1))


def by_name(path: Path) -> str:
    return path.stem if path.suffix == ".yaml" else path.parent.name


def test_every_file_is_walked() -> None:
    assert {path.stem for path in PRESETS} >= {
        *("quickstart_cpu", "arithmetic_smollm2_135m", "ppo_1b_1gpu", "ppo_8b_8gpu"),
        *("ppo_32b_32gpu", "ppo_70b_64gpu", "ppo_405b_512gpu"),
    }
    assert len(PROFILES) >= 4
    assert {*CONFIGS.rglob("*.yaml")} == {*PRESETS, *PROFILES, *CLUSTERS}


@pytest.mark.parametrize("path", CLUSTERS, ids=by_name)
def test_a_cluster_is_read(path: Path) -> None:
    assert read_cluster(path).ranks_per_node > 0


@pytest.mark.parametrize("path", PRESETS, ids=by_name)
def test_dry_run(path: Path, tmp_path: Path) -> None:
    """The very command, from the repository's root, where there are neither models nor prompts."""
    words = ["--config", f"configs/{path.name}", "--dry-run"]
    words += ["--world-size", str(world_size_of(path))]
    if path.stem.startswith("quickstart"):  # its model is made, not published
        (tmp_path / "config.json").write_text(json.dumps(MODEL))
        words += [f"actor.model={tmp_path}"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "launch/train.py", *words], cwd=ROOT, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("samples per step", "packed micro-batch", "roles:", "reshard: each sync receives"):
        assert part in done.stdout
    # Processor seconds: a busy machine is not a fault of the code.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 20


@pytest.mark.parametrize("path", PRESETS, ids=by_name)
def test_header_says_command_cost_and_result(path: Path) -> None:
    header = header_of(path)
    for part in ("# Command", "# Cost:", "# Expect:", f"--config configs/{path.name}"):
        assert part in header, part
    if path.stem.startswith("ppo_"):
        assert "# Layout:" in header
        assert re.search(rf"--world-size {world_size_of(path)}\b", header)
    counts = re.findall(r"--(?:nnodes|nproc-per-node) (\d+)", header)
    assert prod(map(int, counts)) == world_size_of(path)


@pytest.mark.parametrize("path", PRESETS, ids=by_name)
def test_the_reward_function_exists(path: Path) -> None:
    file, _, name = load_config([str(path)]).reward.function.rpartition(":")
    assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("profile", PROFILES, ids=by_name)
def test_profiles_go_with_every_preset(profile: Path) -> None:
    header = header_of(profile)
    for part in ("# Command: ", "# Expect: ", f"--config configs/profiles/{profile.name}"):
        assert part in header
    for preset in PRESETS:
        if not preset.stem.startswith("ppo_"):
            continue
        if (profile.stem, preset.stem) == ("long_responses", "ppo_13b_2gpu"):
            continue  # Llama 2 has a context of 4096 tokens
        paths = [str(preset), str(profile)]
        config = load_and_validate(paths, world_size=world_size_of(preset), check_paths=False)
        assert config != load_config(paths[:1]), "the profile changes nothing"
        read_architectures(config, stand_ins=stand_in_folders([profile]))


@pytest.mark.parametrize("path", MODELS, ids=by_name)
def test_models_have_the_published_size(path: Path) -> None:
    billions = num_parameters(read_architecture_file(path), head="lm") / 1e9
    assert billions == pytest.approx(BILLIONS[path.parent.name], abs=5e-3)
    assert set(BILLIONS) == {model.parent.name for model in MODELS}


def test_a_model_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    stand_ins = stand_in_folders([CONFIGS / "ppo_8b_8gpu.yaml"])
    assert stand_ins == (CONFIGS / "models",)
    own = tmp_path / "Llama-3.1-8B"
    found = find_model(own, stand_ins=stand_ins)
    assert found.config_file == CONFIGS / "models/Llama-3.1-8B/config.json"
    assert f"{own} is not here: planned with the numbers of " in found.note
    own.mkdir()
    (own / "config.json").write_text(json.dumps(MODEL))
    assert find_model(own, stand_ins=stand_ins).config_file == own / "config.json"
    assert find_model(own, stand_ins=stand_ins).note == ""


def test_stand_ins_beside_the_configuration_come_first(tmp_path: Path) -> None:
    (tmp_path / "models" / "Llama-3.1-8B").mkdir(parents=True)
    (tmp_path / "models" / "Llama-3.1-8B" / "config.json").write_text(json.dumps(MODEL))
    stand_ins = stand_in_folders([tmp_path / "my.yaml"])
    found = find_model("elsewhere/Llama-3.1-8B", stand_ins=stand_ins)
    assert found.config_file.parent.parent == tmp_path / "models"
    assert read_architecture_file(found.config_file).num_layers == MODEL["num_hidden_layers"]


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        find_model("models/none", stand_ins=stand_in_folders())
    for part in ("models/none: no such directory", "Llama-3.3-70B, ", "to plan without one"):
        assert part in str(caught.value)


def test_a_run_needs_the_model_itself() -> None:
    path = str(CONFIGS / "ppo_8b_8gpu.yaml")
    with pytest.raises(UserError) as caught:
        load_and_validate([path], overrides=["actor.model=nowhere/Llama-3.1-8B"], world_size=8)
    assert "actor.model=nowhere/Llama-3.1-8B: no such directory; give" in str(caught.value)
    with pytest.raises(UserError, match="nowhere"):
        read_architectures(load_config([path], overrides=["actor.model=nowhere/Llama-3.1-8B"]))
