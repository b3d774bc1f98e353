"""manifest.json of a training checkpoint: what it is, and every file of it with its checksum.

It is written last, into a folder that gets its name later still: a folder without it, or whose
files are not those it lists, is not a checkpoint.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf_megatron.errors import UserError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file as it was written."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class TrainingManifest:
    """What a training checkpoint is."""

    step: int
    run_id: str
    written_at: str
    """ISO 8601, UTC."""
    world_size: int
    layouts: dict[str, dict[str, int | str]]
    """Of each role with an optimizer: the sizes of its parallel layout."""
    versions: dict[str, str]
    files: dict[str, FileRecord] = field(default_factory=dict)
    """By path within the checkpoint, with '/', all but the manifest itself."""
    format_version: int = FORMAT_VERSION

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.files.values())

    def write(self, folder: Path) -> None:
        content = asdict(self)
        content["sha256"] = _digest_of(content)
        with (folder / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)


def read_training_manifest(folder: Path) -> TrainingManifest:
    """Raises UserError: no manifest, so no complete checkpoint; damaged; another format."""
    path = folder / MANIFEST
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "not complete" if folder.is_dir() else "no such folder"
        raise UserError(f"{folder}: {what}: a training checkpoint has {MANIFEST} in it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: damaged, not readable as JSON ({error})") from None
    try:
        version = content["format_version"]
        if version != FORMAT_VERSION:
            raise UserError(
                f"{path}: format version {version!r}; this version reads {FORMAT_VERSION}"
            )
        if content.pop("sha256") != _digest_of(content):
            raise UserError(f"{path}: damaged: its checksum is not that of its content")
        files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
        return TrainingManifest(**content, files=files)
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged: {error!r}") from None


def record_file(path: Path) -> FileRecord:
    """Read a file and describe it."""
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return FileRecord(num_bytes=num_bytes, sha256=digest.hexdigest())


def missing_or_resized(folder: Path, *, manifest: TrainingManifest) -> list[str]:
    """What is wrong with the files at a glance, one line each: missing, or of another size."""
    problems = []
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.stat().st_size != record.num_bytes:
            size = path.stat().st_size
            what = "truncated" if size < record.num_bytes else "too long"
            problems.append(f"{name}: {what}: {size} bytes instead of {record.num_bytes}")
    return problems


def damaged(folder: Path, *, manifest: TrainingManifest, names: Iterable[str]) -> list[str]:
    """Read every byte of the named files; one line for each whose checksum differs."""
    problems = []
    for name in names:
        try:
            found = record_file(folder / name)
        except OSError as error:
            problems.append(f"{name}: cannot be read ({error})")
            continue
        if found != manifest.files[name]:
            problems.append(f"{name}: damaged: its checksum is not the one recorded")
    return problems


def share_of(manifest: TrainingManifest, *, rank: int, world_size: int) -> list[str]:
    """The files that one rank verifies: about as many bytes for each."""
    loads = [0] * world_size
    mine = []
    for name, record in sorted(manifest.files.items(), key=lambda item: -item[1].num_bytes):
        taker = loads.index(min(loads))
        loads[taker] += record.num_bytes
        if taker == rank:
            mine.append(name)
    return mine


def refuse(folder: Path, *, problems: list[str]) -> UserError:
    """The error for a checkpoint with problems."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    listed = "".join(f"\n  - {problem}" for problem in problems)
    return UserError(
        f"{folder}: not a complete, undamaged checkpoint: {count}{listed}\n"
        "Give another one with checkpoint.resume=PATH (tools/inspect_checkpoint.py lists them)"
    )


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
