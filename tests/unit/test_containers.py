"""The Dockerfiles, as far as they can be checked without an engine: what they install is what the
Makefile installs, pinned, from files that are there. hadolint's rules are part of `make lint`."""

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
SCRIPT = ROOT / "requirements" / "install.sh"
FILES_OF_SET = {
    "cpu": ("requirements/cpu.txt", "requirements/cpu-nodeps.txt"),
    "gpu": ("requirements/gpu.txt",),
    "dev": ("requirements/dev.txt",),
    "self": ("setup.py", "pyproject.toml", "README.md", "rlhf_megatron/", "tools/"),
}
"""What each set of the script reads."""
OF_THE_IMAGE = ("torch", "torchvision", "torchaudio", "triton", "flash-attn", "apex")
"""NVIDIA's image brings them: another build of one of them would break the rest."""


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, arguments), comments left out and continued lines joined."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    lines = [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def stages(name: str) -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, those of the stages that it builds on first."""
    found: dict[str, list[tuple[str, str]]] = {}
    own: list[tuple[str, str]] = []
    for instruction, arguments in instructions(name):
        if instruction == "FROM":
            parent, _, stage = arguments.partition(" AS ")
            own = list(found.get(parent, []))
            found[stage] = own
        else:
            own.append((instruction, arguments))
    return found


def installed_sets(text: str) -> list[str]:
    return re.findall(r"requirements/install\.sh (\w+)", text)


def pins(name: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line.strip() and line[0] != "#"]
    return {r.name.lower().replace("_", "-"): r for r in requirements}


@pytest.mark.parametrize("name", DOCKERFILES)
def test_installs_go_through_the_script(name: str) -> None:
    """No RUN calls pip itself; the sets are known; their files were copied before."""
    for stage, lines in stages(name).items():
        copied: list[str] = []
        for instruction, arguments in lines:
            if instruction == "COPY":
                copied += arguments.split()[:-1]
            elif instruction == "RUN":
                assert not re.search(r"\bpip\b", arguments), (stage, arguments)
                for which in installed_sets(arguments):
                    missing = set(FILES_OF_SET[which]) - set(copied) - ({"."} & set(copied))
                    assert not missing, (stage, which, missing)
                    assert "requirements/install.sh" in copied, stage


def test_the_makefile_installs_the_same_way() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "INSTALL := PYTHON=$(BIN)/python requirements/install.sh" in text
    assert re.findall(r"\$\(INSTALL\) (\w+)", text) == ["cpu", "self", "dev"]
    assert not re.search(r"\bpip\b", text)
    ran = [w for _, lines in instructions_of_runs("Dockerfile.cpu") for w in installed_sets(lines)]
    assert sorted(ran) == ["cpu", "dev", "self"]


def instructions_of_runs(name: str) -> list[tuple[str, str]]:
    return [pair for pair in instructions(name) if pair[0] == "RUN"]


@pytest.mark.parametrize("which", sorted(FILES_OF_SET))
def test_what_the_script_runs(which: str, tmp_path: Path) -> None:
    """With a Python that only writes down how it was called."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    ended = subprocess.run(
        [str(SCRIPT), which], env={"PYTHON": str(python), "PATH": "/usr/bin:/bin"}, timeout=30
    )
    assert ended.returncode == 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls and all(c.startswith("-m pip --disable-pip-version-check install") for c in calls)
    read = re.findall(r"--requirement (\S+)", " ".join(calls))
    expected = [name for name in FILES_OF_SET[which] if name.endswith(".txt")]
    assert [str(Path(path).resolve().relative_to(ROOT)) for path in read] == expected
    if which in ("gpu", "self"):
        assert all("--no-deps" in call for call in calls)


def test_the_script_refuses_other_sets() -> None:
    ended = subprocess.run([str(SCRIPT), "tpu"], capture_output=True, text=True, timeout=30)
    assert ended.returncode == 2 and "usage" in ended.stderr


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_is_there_and_not_ignored(name: str) -> None:
    ignored = [
        line.removeprefix("/").removeprefix("**/").rstrip("/")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line and line[0] != "#"
    ]
    assert {".git", ".venv", "runs", "models", "data"} <= set(ignored)
    for instruction, arguments in instructions(name):
        if instruction != "COPY":
            continue
        for source in arguments.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert not any(fnmatch(source.rstrip("/"), pattern) for pattern in ignored), source


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images_are_pinned_and_not_root(name: str) -> None:
    base = re.search(r"^ARG BASE_IMAGE=(\S+)$", (ROOT / name).read_text(), flags=re.MULTILINE)
    assert base is not None
    tag = base.group(1).rpartition(":")[2]
    assert re.search(r"\d", tag) and "latest" not in tag
    found = stages(name)
    assert list(found)[-1] == "runtime"  # what a plain build makes
    users = [arguments for instruction, arguments in found["runtime"] if instruction == "USER"]
    assert users and re.fullmatch(r"\d+:\d+", users[-1])
    assert any("pytest tests/unit" in arguments for i, arguments in found["test"] if i == "RUN")
    assert not any("pytest" in arguments for i, arguments in found["runtime"])


@pytest.mark.parametrize("name", ["cpu.txt", "cpu-nodeps.txt", "dev.txt", "gpu.txt"])
def test_every_requirement_is_pinned(name: str) -> None:
    for requirement in pins(name).values():
        assert re.fullmatch(r"==[\w.!]+", str(requirement.specifier)), requirement


def test_the_gpu_set_fits_the_image_and_setup_py() -> None:
    found = pins("gpu.txt")
    assert not [n for n in found if n in OF_THE_IMAGE or n.startswith("transformer-engine")]
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    for name in ("vllm", "megatron-core"):
        assert f'"{name}{found[name].specifier}; python_version' in setup
    needed = re.search(r"install_requires=\[(.*?)\n    \],", setup, flags=re.DOTALL)
    assert needed is not None
    for text in re.findall(r'"([^"]+)"', needed.group(1)):
        requirement = Requirement(text)
        pin = next(iter(found[canonicalize_name(requirement.name)].specifier)).version
        assert requirement.specifier.contains(pin), text
