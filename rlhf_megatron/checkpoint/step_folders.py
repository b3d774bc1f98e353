"""The folder of a run's training checkpoints: names, the marker, and which ones stay.

RUN/checkpoints/
  latest                   the marker: one line with the name of the current checkpoint
  step_000010/             a complete checkpoint
  step_000020.tmp-1a2b3c   one that is being written, or was when its job ended
  step_000005.old-4d5e6f   one that is being removed

A checkpoint is written under its .tmp- name, verified, renamed, and made current by the marker,
whose replacement is one atomic rename. Nothing else names the current checkpoint.
"""

import os
import re
import shutil
from pathlib import Path

from rlhf_megatron.errors import UserError

LATEST = "latest"
_STEP = re.compile(r"step_(\d{6,})")
_LEFT_OVER = re.compile(r"step_\d{6,}\.(tmp|old)-\w+")


def step_folder(checkpoints: Path, *, step: int) -> Path:
    """CHECKPOINTS/step_000010."""
    return checkpoints / f"step_{step:06d}"


def step_of(folder: Path) -> int | None:
    """The step in a folder's name; None where it is not a checkpoint's name."""
    found = _STEP.fullmatch(folder.name)
    return int(found.group(1)) if found else None


def temporary_folder(checkpoints: Path, *, step: int, token: str) -> Path:
    """Where the files of a checkpoint are written until it is complete. `token`: any word."""
    folder = step_folder(checkpoints, step=step)
    return folder.with_name(f"{folder.name}.tmp-{token}")


def current_checkpoint(checkpoints: Path) -> Path | None:
    """The checkpoint that the marker names; None where there is no marker.

    Raises UserError where the marker cannot be read or names nothing that is there.
    """
    marker = checkpoints / LATEST
    try:
        name = marker.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{marker}: cannot be read ({error})") from None
    folder = checkpoints / name
    if step_of(folder) is None or not folder.is_dir():
        there = ", ".join(path.name for _, path in sorted(complete_steps(checkpoints).items()))
        raise UserError(
            f"{marker}: names {name!r}, which is not there; there is {there or 'no checkpoint'}. "
            "Give one of them with checkpoint.resume=PATH, or checkpoint.resume=never"
        )
    return folder


def complete_steps(checkpoints: Path) -> dict[int, Path]:
    """Every step_ folder by its step. They are complete: others have another name."""
    if not checkpoints.is_dir():
        return {}
    found = {step_of(path): path for path in checkpoints.iterdir() if path.is_dir()}
    return {step: path for step, path in found.items() if step is not None}


def make_current(temporary: Path) -> Path:
    """Give a complete checkpoint its name and let the marker name it. Returns its new path.

    An earlier checkpoint of the same step, which the marker cannot name, is replaced.
    """
    folder = temporary.with_name(temporary.name.partition(".")[0])
    if folder.exists():
        _remove(folder)
    temporary.rename(folder)
    _sync_folder(folder.parent)
    write_marker(folder)
    return folder


def write_marker(folder: Path) -> None:
    """Make `folder` the current checkpoint, by one atomic rename."""
    marker = folder.parent / LATEST
    partial = marker.with_name(f".{LATEST}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(f"{folder.name}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, marker)
    _sync_folder(marker.parent)


def prune(checkpoints: Path, *, current: Path, keep_last: int, keep_every: int) -> list[Path]:
    """Remove old checkpoints; returns those that went. `current` stays, as do the `keep_last`
    newest and, where `keep_every` is not 0, those of its multiples."""
    steps = complete_steps(checkpoints)
    newest = sorted(steps)[-keep_last:]
    gone = [
        path
        for step, path in sorted(steps.items())
        if step not in newest and path != current and not (keep_every and step % keep_every == 0)
    ]
    for path in gone:
        _remove(path)
    return gone


def go_back(folder: Path) -> list[Path]:
    """Make `folder` the current checkpoint of its run and remove those of later steps."""
    write_marker(folder)
    own = step_of(folder)
    assert own is not None, folder
    later = [path for step, path in complete_steps(folder.parent).items() if step > own]
    for path in later:
        _remove(path)
    return later


def remove_leftovers(checkpoints: Path) -> None:
    """Remove what an ended job has left half-written or half-removed."""
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Rename first: a folder that is half gone must not have a checkpoint's name."""
    going = folder.with_name(f"{folder.name}.old-{os.urandom(3).hex()}")
    folder.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
