"""What is in a checkpoint on the disk: contents, sizes, layouts, versions, completeness."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_megatron.checkpoint.manifest import KINDS, Manifest, open_role_folder
from rlhf_megatron.checkpoint.optimizer_slices import MASTER, MOMENTS
from rlhf_megatron.checkpoint.paths import RoleFolder
from rlhf_megatron.checkpoint.sharded_files import audit_sharded, model_parameters, open_sharded
from rlhf_megatron.checkpoint.step_folders import complete_steps, current_checkpoint, step_of
from rlhf_megatron.checkpoint.training_manifest import (
    MANIFEST,
    TrainingManifest,
    damaged,
    missing_or_resized,
    read_training_manifest,
)
from rlhf_megatron.errors import UserError

_OPTIMIZER = "optimizer"


@dataclass
class RoleContents:
    """One role's part of a checkpoint."""

    name: str
    manifest: Manifest | None = None
    weights_bytes: int = 0
    optimizer_bytes: int = 0
    optimizer_states: list[str] = field(default_factory=list)


@dataclass
class CheckpointContents:
    """A checkpoint as it lies on the disk."""

    folder: Path
    manifest: TrainingManifest | None = None
    """None where it was written by a conversion tool, or is not complete."""
    roles: list[RoleContents] = field(default_factory=list)
    num_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Plain values, for --json."""
        manifest = self.manifest
        return {
            "folder": str(self.folder),
            "complete": not self.problems,
            "problems": self.problems,
            "bytes": self.num_bytes,
            "step": manifest.step if manifest else None,
            "run_id": manifest.run_id if manifest else None,
            "written_at": manifest.written_at if manifest else None,
            "world_size": manifest.world_size if manifest else None,
            "layouts": manifest.layouts if manifest else {},
            "versions": manifest.versions if manifest else {},
            "files": len(manifest.files) if manifest else None,
            "roles": {
                role.name: {
                    "head": role.manifest.head if role.manifest else None,
                    "dtype": role.manifest.dtype if role.manifest else None,
                    "parameters": role.manifest.num_parameters if role.manifest else None,
                    "weights_bytes": role.weights_bytes,
                    "optimizer_bytes": role.optimizer_bytes,
                    "optimizer_states": role.optimizer_states,
                }
                for role in self.roles
            },
        }

    def describe(self, *, current: bool, verified: bool) -> str:
        """A few lines for a person."""
        state = "NOT COMPLETE" if self.problems else "complete"
        if verified and self.manifest is not None and not self.problems:
            state += ", every byte verified"
        lines = [f"{self.folder}: {state}{', the current one' if current else ''}"]
        if self.manifest is not None:
            of = self.manifest
            versions = ", ".join(f"{name} {version}" for name, version in of.versions.items())
            lines.append(f"  step {of.step} of run {of.run_id}, {of.written_at}, by {versions}")
            for role, layout in of.layouts.items():
                words = ", ".join(f"{name} {value}" for name, value in layout.items())
                lines.append(f"  {role} at {words}, of {of.world_size} ranks")
        lines += [f"  {role.name}/: {_role_in_words(role)}" for role in self.roles]
        count = f" in {len(self.manifest.files)} files" if self.manifest else ""
        lines.append(f"  {_megabytes(self.num_bytes)}{count}")
        lines += [f"  - {problem}" for problem in self.problems]
        return "\n".join(lines)


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoint `path`, or all those of the run or of the folder of checkpoints `path`.

    Raises UserError where there is none.
    """
    if (path / MANIFEST).exists() or step_of(path) is not None:
        return [path]
    for folder in (path / "checkpoints", path):
        steps = complete_steps(folder)
        if steps:
            return [steps[step] for step in sorted(steps)]
    if any(RoleFolder(part).manifest.exists() for part in _parts(path)):
        return [path]
    raise UserError(f"{path}: no checkpoint; give one, or the folder of a run that has some")


def marked(path: Path) -> Path | None:
    """The current checkpoint of the run that `path` is, or lies in. Raises UserError for a marker
    that names nothing."""
    for folder in (path / "checkpoints", path, path.parent):
        found = current_checkpoint(folder)
        if found is not None:
            return found
    return None


def inspect(folder: Path, *, verify: bool) -> CheckpointContents:
    """Look at a checkpoint; `verify`: read every byte of it, where checksums were recorded."""
    found = CheckpointContents(folder)
    if (folder / MANIFEST).exists() or step_of(folder) is not None:
        try:
            found.manifest = read_training_manifest(folder)
            found.problems += missing_or_resized(folder, manifest=found.manifest)
            if verify and not found.problems:
                found.problems += damaged(
                    folder, manifest=found.manifest, names=found.manifest.files
                )
        except UserError as error:
            found.problems.append(str(error))
    for part in _parts(folder):
        if RoleFolder(part).manifest.exists() or RoleFolder(part).weights.exists():
            found.roles.append(_role(part, problems=found.problems))
    found.num_bytes = _bytes_under(folder)
    return found


def _parts(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _role(part: Path, *, problems: list[str]) -> RoleContents:
    role, folder = RoleContents(part.name), RoleFolder(part)
    role.weights_bytes = _bytes_under(folder.weights)
    role.optimizer_bytes = _bytes_under(part / _OPTIMIZER)
    try:
        opened = open_role_folder(folder)
        role.manifest = opened.manifest
        parameters = model_parameters(opened.arch, head=opened.manifest.head, stored={})
        stored = open_sharded(folder.weights)
        audit_sharded(
            folder.weights,
            stored=stored,
            parameters=model_parameters(opened.arch, head=opened.manifest.head, stored=stored),
            num_layers=opened.arch.num_layers,
        )
        if (part / _OPTIMIZER).exists():
            state = open_sharded(part / _OPTIMIZER)
            for name in (MASTER, *MOMENTS):
                prefix = f"optimizer.state.{name}."
                keys = {key.removeprefix(prefix) for key in state if key.startswith(prefix)}
                if {parameter.key for parameter in parameters} <= keys:
                    role.optimizer_states.append(name)
    except UserError as error:
        problems.append(str(error))
    return role


def _role_in_words(role: RoleContents) -> str:
    manifest = role.manifest
    if manifest is None:
        return "cannot be read"
    parts = [
        f"{KINDS[manifest.head]}, {manifest.num_parameters / 1e6:,.1f} M parameters in "
        f"{manifest.dtype}, {_megabytes(role.weights_bytes)}"
    ]
    if role.optimizer_states:
        states = ", ".join(role.optimizer_states)
        parts.append(f"optimizer ({states}) {_megabytes(role.optimizer_bytes)}")
    else:
        parts.append("no optimizer")
    return "; ".join(parts)


def _bytes_under(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
