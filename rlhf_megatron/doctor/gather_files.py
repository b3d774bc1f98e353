"""Files and folders as one node sees them."""

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from rlhf_megatron.checkpoint.hf_files import open_weight_files
from rlhf_megatron.config import Config
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.doctor.facts import FileFacts, FolderFacts
from rlhf_megatron.errors import UserError

SMALL_BYTES = 2**20
"""Files up to this size are compared by content, larger ones by size."""
WRITE_BYTES = 256 * 2**20
WRITE_CHUNK_BYTES = 16 * 2**20
SEEN_WITHIN_SECONDS = 5.0
"""A network file system may show a new file late."""


def input_paths(config: Config) -> dict[str, str]:
    """What the run reads, by key."""
    file, colon, _ = config.reward.function.rpartition(":")
    paths = {
        "actor.model": config.actor.model,
        "critic.model": config.critic.model,
        "ref.model": config.ref.model if config.ppo.kl.place != "off" else "",
        "reward.model": config.reward.model,
        "reward.function": file if colon and file.endswith(".py") else "",
        "data.prompts": config.data.prompts,
        "data.tokenizer": config.data.tokenizer,
        "evaluation.prompts": config.evaluation.prompts,
        "warmup.demonstrations": config.warmup.demonstrations if config.warmup.steps else "",
    }
    return {key: path for key, path in paths.items() if path}


def gather_files(paths: Mapping[str, str], *, weights: bool) -> tuple[FileFacts, ...]:
    """Open each, and each file of a directory. `weights`: read the headers of models' weights,
    too, which finds those that are damaged or cut off."""
    return tuple(_file(key, path=Path(path), weights=weights) for key, path in paths.items())


def _file(key: str, *, path: Path, weights: bool) -> FileFacts:
    try:
        files = _readable_files(path)
        if weights and key.endswith(".model"):
            problems = open_weight_files(path).problems
            if problems:
                return FileFacts(key=key, path=str(path), problem="; ".join(problems))
        return FileFacts(
            key=key,
            path=str(path),
            num_bytes=sum(file.stat().st_size for file in files),
            fingerprint=_fingerprint(files),
        )
    except (OSError, UserError) as error:
        return FileFacts(key=key, path=str(path), problem=str(error))


def _readable_files(path: Path) -> list[Path]:
    """The file, or those directly in a directory. Raises OSError where one cannot be read."""
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as stream:
            stream.read(1)
    return files


def _fingerprint(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        if size <= SMALL_BYTES:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def tokenizer_problem(config: Config) -> str:
    """Why the tokenizer does not load; "" where it does."""
    try:
        load_tokenizer(config.data.tokenizer or config.actor.model)
    except (UserError, OSError) as error:
        return str(error)
    return ""


def existing_folder(path: str) -> Path:
    """The folder, or its nearest parent that is there: nothing is made before the run begins."""
    folder = Path(path).absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def leave_probe(path: str) -> Path | None:
    """Write a small file that the other nodes look for. None where it cannot be written."""
    probe = existing_folder(path) / f".rlhf_megatron_probe_{uuid.uuid4().hex}"
    try:
        probe.write_text("written by the preflight; safe to remove\n")
    except OSError:
        return None
    return probe


def gather_folder(path: str, *, probe: Path | None, measure: bool) -> FolderFacts:
    """The folder that the run writes to. `probe`: rank 0's file, None where it left none.
    `measure`: write 256 MiB, to be called by all nodes at once."""
    folder = existing_folder(path)
    problem = write_problem(folder)
    speed = None
    if measure and not problem:
        try:
            speed = measure_write(folder)
        except OSError as error:
            problem = f"{folder}: {error}"
    return FolderFacts(
        path=str(folder),
        problem=problem,
        free_bytes=shutil.disk_usage(folder).free,
        checkpoint_bytes=bytes_below(Path(path) / "checkpoints"),
        is_shared=probe is None or appears(probe),
        write_bytes_per_second=speed,
    )


def write_problem(folder: Path) -> str:
    """Why no file can be written there; "" where one can."""
    if not folder.is_dir():
        return f"{folder}: is a file"
    probe = folder / f".rlhf_megatron_probe_{uuid.uuid4().hex}"
    try:
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        return f"{folder}: cannot be written to: {error.strerror or error}"
    return ""


def appears(path: Path) -> bool:
    """Whether a file that another node has written is seen here, if need be after a while."""
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while True:
        try:
            # A listing makes a network file system look anew.
            if path.name in os.listdir(path.parent):
                return True
        except OSError:
            pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def measure_write(folder: Path, *, num_bytes: int = WRITE_BYTES) -> float:
    """Bytes a second into one file, until they are on the disk."""
    chunk = os.urandom(min(num_bytes, WRITE_CHUNK_BYTES))
    path = folder / f".rlhf_megatron_write_{uuid.uuid4().hex}"
    try:
        begin = time.perf_counter()
        with path.open("wb", buffering=0) as stream:
            for _ in range(max(num_bytes // len(chunk), 1)):
                stream.write(chunk)
            os.fsync(stream.fileno())
        return num_bytes / (time.perf_counter() - begin)
    finally:
        path.unlink(missing_ok=True)


def bytes_below(folder: Path) -> int:
    """Of all files in a folder and below it; 0 where there is none."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total
