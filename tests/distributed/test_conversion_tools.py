"""The conversion tools' command lines: two real runs of several processes, then what is refused
before anything starts, in this process."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_megatron.cli import TOOLS
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.layout.tensors import logical_tensors

ROOT = Path(__file__).parents[2]
LONGEST_SECONDS = 240
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_model(folder, **changes):
    """A random model in two files; returns its tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    generator = torch.Generator().manual_seed(3)
    tensors = {
        t.name: torch.randn(t.shape, generator=generator).bfloat16()
        for t in logical_tensors(read_architecture(folder), head="lm")
    }
    names = sorted(tensors)
    index = {}
    for file, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tensors


def run(name, *words):
    """The tool as a user starts it."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )


def refusal(capsys, name, *words):
    """Of a tool's main, in this process: the one message of exit code 2."""
    assert tool(name).main([str(word) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error: ") == 1
    return captured.err


def test_to_megatron_and_back(tmp_path):
    tensors = write_model(tmp_path / "model")
    done = run(
        *("hf_to_megatron", "--model", tmp_path / "model", "--output", tmp_path / "checkpoint"),
        *("--tensor-parallel", 1, "--pipeline-parallel", 2),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {tmp_path}/checkpoint/actor\n"
    lines = done.stderr.splitlines()
    assert [line.split()[0] for line in lines] == ["reading", "writing"], done.stderr
    assert all("0.1 MB" in line and "MB/s" in line for line in lines)
    done = run(
        *("megatron_to_hf", "--checkpoint", tmp_path / "checkpoint", "--output", tmp_path / "hf"),
        *("--nproc-per-node", 2, "--max-shard-gb", 2e-5),
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    found = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        found |= load_file(path)
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert {path.name for path in tmp_path.iterdir()} == {"model", "checkpoint", "hf"}


def test_a_damaged_model_ends_the_ranks_with_one_list_and_leaves_nothing(tmp_path):
    tensors = write_model(tmp_path / "model")
    part = load_file(tmp_path / "model" / "a.safetensors")
    missing = sorted(part)[0]
    del part[missing]
    part["model.norm.weight"] = torch.zeros(5)
    part["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(4)
    save_file(part, tmp_path / "model" / "a.safetensors")
    content = (tmp_path / "model" / "b.safetensors").read_bytes()
    (tmp_path / "model" / "b.safetensors").write_bytes(content[:-7])
    done = run(
        *("hf_to_megatron", "--model", tmp_path / "model", "--output", tmp_path / "checkpoint"),
        *("--pipeline-parallel", 2),
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and done.stderr.count("error: ") == 1
    lost = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    expected = [
        "b.safetensors: truncated or damaged",
        f"{missing}: missing",
        "model.layers.0.self_attn.q_norm.weight: not a tensor of a llama model of 4 layers",
    ]
    if lost["weight_map"]["model.norm.weight"] == "a.safetensors":
        expected.append("model.norm.weight: shape [5], expected [24]")
    for text in expected:
        assert text in done.stderr, done.stderr
    # What the damaged file holds is not said to be missing.
    assert done.stderr.count(": missing") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
    assert len(tensors) > 30


def test_dry_runs_print_the_plan_and_write_nothing(tmp_path, capsys):
    write_model(tmp_path / "model")
    words = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--dry-run"]
    assert tool("hf_to_megatron").main([*words, "--tensor-parallel", "3"]) == 0
    text = capsys.readouterr().out
    assert "llama language model of 4 layers" in text
    assert "TP3 PP1 VPP1, 3 processes, bfloat16, 0.1 MB" in text
    assert text.count("holds 0.0 MB") == 3
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


@pytest.mark.parametrize(
    ("changes", "words", "phrases"),
    [
        ({"model_type": "mamba"}, (), ["model_type 'mamba' is not supported; known: "]),
        ({}, ("--tensor-parallel", 2), ["KV heads 3", "tensor parallel size 2"]),
        ({}, ("--pipeline-parallel", 3), ["layers 4", "pipeline parallel size 3"]),
        ({}, ("--virtual-pipeline", 2), ["--virtual-pipeline 2: needs --pipeline-parallel"]),
        (
            {},
            ("--pipeline-parallel", 2, "--nproc-per-node", 3),
            ["--nproc-per-node 3", "1 x 2 = 2"],
        ),
        ({"dtype": "float64"}, (), ["dtype 'float64' is not known; give --dtype"]),
    ],
)
def test_import_refuses_before_it_starts(tmp_path, capsys, changes, words, phrases):
    if "model_type" in changes:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | changes))
    else:
        write_model(tmp_path / "model", **changes)
    text = refusal(
        *(capsys, "hf_to_megatron", "--model", tmp_path / "model"),
        *("--output", tmp_path / "out", *words),
    )
    for phrase in phrases:
        assert phrase in text
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_outputs_that_must_not_be_touched(tmp_path, capsys):
    write_model(tmp_path / "model")
    (tmp_path / "out").mkdir()
    read = ("hf_to_megatron", "--model", tmp_path / "model", "--output")
    assert "exists already" in refusal(capsys, *read, tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refusal(capsys, *read, tmp_path / "file", "--force")
    for output in (tmp_path / "model", tmp_path / "model" / "inside", tmp_path):
        assert "overlaps with the input" in refusal(capsys, *read, output, "--force")
    for name in ("megatron_to_hf", "convert_checkpoint"):
        words = (name, "--checkpoint", tmp_path / "out", "--output", tmp_path / "new")
        assert "no checkpoint; expected actor or critic" in refusal(capsys, *words)


def test_the_console_command_knows_the_tools():
    assert {"hf-to-megatron", "megatron-to-hf", "convert-checkpoint"} <= set(TOOLS)
    for name in TOOLS.values():
        assert (ROOT / "tools" / f"{name}.py").exists()
