"""The small JSON beside a role's sharded weights: what they are and who wrote them."""

import json
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlhf_megatron import __version__
from rlhf_megatron.checkpoint.paths import ROLES, RoleFolder
from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.architecture import ModelArchitecture, read_architecture
from rlhf_megatron.layout.tensors import Head

FORMAT_VERSION = 1
HEADS: dict[str, Head] = {"actor": "lm", "critic": "value"}
"""What the roles of the trainer have, where each is a model of its own."""
KINDS: dict[Head, str] = {
    "lm": "language model",
    "value": "value model",
    "joint": "language model with a value head",
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """checkpoint.json. The architecture is in hf/config.json beside it."""

    head: Head
    dtype: str
    """Name of the torch dtype of the weights."""
    num_parameters: int
    written_at: dict[str, int]
    """The layout of the ranks that wrote it; it can be loaded at any other."""
    versions: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def write(self, folder: RoleFolder) -> None:
        folder.manifest.write_text(json.dumps(asdict(self), indent=2) + "\n")


@dataclass(frozen=True)
class RoleCheckpoint:
    """One role's part of a checkpoint, as its small files describe it."""

    folder: RoleFolder
    manifest: Manifest
    arch: ModelArchitecture
    exports: Head
    """What of it becomes a Hugging Face directory: of a model with both heads, one of them."""


def installed_versions() -> dict[str, str]:
    """Of this project and of the libraries that decide about the format."""
    found = {"rlhf-megatron": __version__}
    for name in ("megatron-core", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # on PYTHONPATH, without metadata
            found[name] = "unknown"
    return found


def open_role(checkpoint: str | Path, *, role: str | None) -> RoleCheckpoint:
    """Read a role's small files; without a role, those of the only one there is.

    Raises UserError: no checkpoint there, several roles and none named, another format, or a model
    that is not supported.
    """
    checkpoint = Path(checkpoint)
    found = [name for name in ROLES if RoleFolder(checkpoint / name).manifest.exists()]
    if not found:
        raise UserError(
            f"{checkpoint}: no checkpoint; expected {' or '.join(ROLES)} in it, with"
            " checkpoint.json"
        )
    if role is None and len(found) > 1:
        raise UserError(f"{checkpoint}: holds {' and '.join(found)}; choose one with --role")
    if role is not None and role not in found:
        raise UserError(f"{checkpoint}: holds no {role}, only {' and '.join(found)}")
    return open_role_folder(RoleFolder(checkpoint / (role or found[0])))


def open_role_for_export(checkpoint: str | Path, *, role: str | None) -> RoleCheckpoint:
    """As `open_role`; the critic of a shared backbone is the actor's backbone with its value head,
    which transformers knows as a sequence classification model."""
    if role == "critic" and not RoleFolder(Path(checkpoint) / role).manifest.exists():
        actor = RoleFolder(Path(checkpoint) / "actor")
        if actor.manifest.exists():
            opened = open_role_folder(actor)
            if opened.manifest.head == "joint":
                return replace(opened, exports="value")
    return open_role(checkpoint, role=role)


def open_role_folder(folder: RoleFolder) -> RoleCheckpoint:
    """Read the small files of one role. Raises UserError."""
    manifest = _read(folder.manifest)
    exports: Head = "value" if manifest.head == "value" else "lm"
    return RoleCheckpoint(folder, manifest, read_architecture(folder.hf), exports)


def _read(path: Path) -> Manifest:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        written = content["format_version"]
        if written != FORMAT_VERSION:
            raise UserError(
                f"{path}: format version {written!r}; this version reads {FORMAT_VERSION}"
            )
        manifest = Manifest(**content)
        if manifest.head not in KINDS:
            raise ValueError(f"head {manifest.head!r} is none of {', '.join(KINDS)}")
        return manifest
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not readable as a checkpoint's description: {error}") from None
