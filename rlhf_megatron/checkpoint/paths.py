"""Where the parts of a sharded checkpoint lie, and checks of what a tool is about to write.

CHECKPOINT/
  actor/, critic/       one folder a role
    checkpoint.json     what it is (checkpoint/manifest.py)
    hf/                 config.json, generation config and tokenizer files of the model
    weights/            a directory of megatron.core.dist_checkpointing
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.errors import UserError

ROLES = ("actor", "critic")


@dataclass(frozen=True)
class RoleFolder:
    """The folder of one role in a checkpoint."""

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "checkpoint.json"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @property
    def weights(self) -> Path:
        return self.path / "weights"


def partial_folder(output: Path) -> Path:
    """Where the files of `output` are written until they are complete."""
    return output.with_name(f".{output.name}.partial")


def remove_partial(output: Path) -> None:
    """Remove what an unfinished write has left beside `output`."""
    shutil.rmtree(partial_folder(output), ignore_errors=True)


def check_output(output: Path, *, overwrite: bool, source: Path | None = None) -> None:
    """Raise UserError where `output` must not be written: it exists and `overwrite` is not set, it
    is a file, or it is, holds or lies in `source`, from which the tool reads."""
    if source is not None:
        here, there = output.resolve(), source.resolve()
        if here == there or here in there.parents or there in here.parents:
            raise UserError(f"--output {str(output)!r}: overlaps with the input {str(source)!r}")
    if output.exists() and not output.is_dir():
        raise UserError(f"{output}: is a file; give the name of a directory")
    if output.exists() and not overwrite:
        raise UserError(
            f"{output}: exists already; choose another path, or ask to replace it (--force of the"
            " tools)"
        )


def check_free_space(output: Path, *, num_bytes: int) -> None:
    """Raise UserError where the file system of `output` has less than `num_bytes` left."""
    existing = next(path for path in (output, *output.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise UserError(
            f"{output}: needs {num_bytes / 1e6:,.1f} MB, and {existing} has {free / 1e6:,.1f} MB"
            " free; free some space or choose another disk"
        )
