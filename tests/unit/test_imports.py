"""The import rule: rooms depend on each other one way, and each big dependency has its rooms.

Imports are read from the syntax trees, those inside functions included; nothing is executed.

    config, errors, schema, batch, every room's config.py
      <- algorithms, layout, slurm <- validation, resolve <- distributed <- models
      <- engine, reshard, rollout, rewards, data, checkpoint <- memory <- simulator <- trainer
      <- doctor
      <- launch, tools, benchmarks, and main.py and cli.py, which they call
    The other modules on the package's top level are parts of the loop: they count as trainer.
    observability imports config only; engine, reshard, rollout, trainer and above import it
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "rlhf_megatron"

# Rooms of one level do not import each other, but for the exceptions below.
LEVELS = [
    {"base"},
    {"algorithms", "layout", "slurm"},
    {"settings"},
    {"distributed"},
    {"models"},
    {"engine", "reshard", "rollout", "rewards", "data", "checkpoint"},
    {"memory"},
    {"simulator"},
    {"trainer"},
    {"doctor"},
    {"top"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
BASE_FILES = {"__init__", "batch", "config", "errors", "faults_config", "folders"}
BASE_FILES |= {"config_names", "loader", "placement_config", "schema", "secret_values"}
# Rules between options read rank lists, so they stand above layout.
SETTINGS_FILES = {"resolve", "role_ranks", "shared_backbone", "validation", "validation_model"}
SETTINGS_FILES |= {"validation_placement", "validation_precision"}
TOP_FILES = {"cli", "main"}
ROOMS = set().union(*LEVELS) - {"base", "settings", "trainer", "top"} | {"observability"}
EXCEPTIONS = {
    (
        "checkpoint",
        "reshard",
    ): "export is a reshard from Megatron to Hugging Face boxes: same planner",
}
NEVER_EACH_OTHER = {"algorithms", "engine", "rollout", "reshard"}
OBSERVABILITY_IMPORTERS = {"engine", "reshard", "rollout", "simulator", "trainer", "top"}
DEPENDENCIES = {
    "megatron": {"distributed", "models", "engine", "checkpoint", "benchmarks"},
    "vllm": {"rollout/vllm"},
    "transformers": {"data", "checkpoint", "rollout/hf.py", "rewards", "tools", "benchmarks"},
    "plotly": {"observability"},
    "safetensors": {"data", "checkpoint", "rollout/hf.py", "rewards", "tools", "benchmarks"},
}


def source_files() -> list[Path]:
    folders = ("rlhf_megatron", "launch", "tools", "benchmarks")
    return sorted(path for name in folders for path in (ROOT / name).rglob("*.py"))


def inner_path(path: Path) -> str:
    """`rollout/hf.py` for a file of the package, `tools/report.py` for one outside it."""
    return path.relative_to(ROOT).as_posix().removeprefix(f"{PACKAGE}/")


def room_of_parts(parts: list[str]) -> str:
    """The room of a module of the package, from its dotted parts without the package's name."""
    if not parts or parts[-1] == "config":
        return "base"
    first = parts[0]
    if first in BASE_FILES:
        return "base"
    if first in SETTINGS_FILES:
        return "settings"
    if first in TOP_FILES:
        return "top"
    if (ROOT / PACKAGE / first).is_dir():
        assert first in ROOMS, f"{first}/ has no place in the house plan"
        return first
    return "trainer"


def room_of_file(path: Path) -> str:
    relative = path.relative_to(ROOT)
    if relative.parts[0] != PACKAGE:
        return "top"
    return room_of_parts([p for p in relative.with_suffix("").parts[1:] if p != "__init__"])


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names, `package.module` of `from package import module` included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write rlhf_megatron...."
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_module(parts: list[str]) -> bool:
    place = ROOT / PACKAGE / Path(*parts) if parts else ROOT / PACKAGE
    return place.is_dir() or place.with_suffix(".py").is_file()


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for module in imported_modules(path):
        name, *parts = module.split(".")
        if name != PACKAGE:
            continue
        if not is_module(parts):  # the last part is a name inside the module
            parts = parts[:-1]
        rooms.add(room_of_parts(parts))
    return rooms


def breach(importer: str, *, imported: str) -> str:
    """Why a module of room `importer` may not import room `imported`; "" if it may."""
    if importer == imported or (importer, imported) in EXCEPTIONS:
        return ""
    if importer == "observability":
        return "" if imported == "base" else "observability imports config only"
    if imported == "observability":
        allowed = importer in OBSERVABILITY_IMPORTERS
        return "" if allowed else f"{importer} does not import observability"
    if {importer, imported} <= NEVER_EACH_OTHER:
        return f"{importer} and {imported} never import each other"
    if LEVEL[imported] >= LEVEL[importer]:
        return f"{imported} does not stand below {importer}"
    return ""


def dependency_breach(path: str, *, module: str) -> str:
    """Why the file at `path` may not import `module`; "" if it may."""
    rooms = DEPENDENCIES.get(module.split(".")[0])
    if rooms is None:
        return ""
    for room in rooms:
        file_prefix = "/" in room  # a file, or the beginning of file names
        if path.startswith(room if file_prefix else f"{room}/"):
            return ""
    return f"{module} belongs into {', '.join(sorted(rooms))}"


@pytest.mark.parametrize("path", source_files(), ids=inner_path)
def test_imports_point_one_way(path: Path) -> None:
    room = room_of_file(path)
    found = [breach(room, imported=other) for other in sorted(imported_rooms(path))]
    assert [text for text in found if text] == []


@pytest.mark.parametrize("path", source_files(), ids=inner_path)
def test_dependencies_stay_in_their_rooms(path: Path) -> None:
    inner = inner_path(path)
    found = [dependency_breach(inner, module=module) for module in imported_modules(path)]
    assert [text for text in found if text] == []


def test_the_memory_planner_needs_no_torch() -> None:
    """It plans on a login node within a second or two; megatron and vllm come with torch."""
    program = "import sys, rlhf_megatron.memory.report; print('torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("engine", "models", True),
        ("models", "engine", False),
        ("algorithms", "base", True),
        ("base", "layout", False),
        ("settings", "layout", True),
        ("rollout", "reshard", False),
        ("engine", "algorithms", False),
        ("trainer", "algorithms", True),
        ("reshard", "layout", True),
        ("checkpoint", "reshard", True),
        ("reshard", "checkpoint", False),
        ("data", "rewards", False),
        ("rewards", "observability", False),
        ("rollout", "observability", True),
        ("observability", "base", True),
        ("observability", "layout", False),
        ("top", "trainer", True),
        ("trainer", "top", False),
        ("memory", "reshard", True),
        ("memory", "trainer", False),
        ("engine", "memory", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert (breach(importer, imported=imported) == "") is allowed


def test_dependencies_rule_itself() -> None:
    assert dependency_breach("rollout/vllm_engine.py", module="vllm.config") == ""
    assert dependency_breach("rollout/factory.py", module="vllm") != ""
    assert dependency_breach("rollout/hf.py", module="transformers") == ""
    assert dependency_breach("tools/make_quickstart.py", module="transformers") == ""
    assert dependency_breach("trainer.py", module="megatron.core.parallel_state") != ""
    assert dependency_breach("models/build.py", module="megatron.core") == ""
    assert dependency_breach("database/x.py", module="transformers") != ""
    assert dependency_breach("algorithms/gae.py", module="torch") == ""


def test_rooms_are_told_from_paths() -> None:
    package = ROOT / PACKAGE
    assert room_of_file(package / "rollout" / "config.py") == "base"
    assert room_of_file(package / "rollout" / "contract.py") == "rollout"
    assert room_of_file(package / "layout" / "families" / "__init__.py") == "layout"
    assert room_of_file(package / "__init__.py") == "base"
    assert room_of_file(package / "validation.py") == "settings"
    assert room_of_file(ROOT / "tools" / "report.py") == "top"
    assert room_of_file(package / "main.py") == "top"
    assert room_of_file(package / "trainer.py") == "trainer"
    assert room_of_file(package / "ppo.py") == "trainer"
    assert imported_rooms(package / "validation.py") == {"base", "layout", "settings"}
