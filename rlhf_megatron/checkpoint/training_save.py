"""One training checkpoint on its way to the disk: planned together, written in the background, and
made current together when every rank's files are complete.

    save = TrainingSave(checkpoints, step=10, plans={"actor/weights": SavePlans()}, ...)
    save.plan("actor/weights", state=...)     # collective, one call a directory
    save.begin({"rng/rank_0000.pt": rng})     # returns at once
    ...                                       # training goes on
    save.is_written()                         # local
    save.finish(manifest, small_files=...)    # collective; waits for this rank's writer
"""

import io
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.checkpoint.compat import SavePlans, finish_save, plan_save, write_files
from rlhf_megatron.checkpoint.paths import check_free_space
from rlhf_megatron.checkpoint.step_folders import make_current, temporary_folder
from rlhf_megatron.checkpoint.training_manifest import (
    FileRecord,
    TrainingManifest,
    missing_or_resized,
    record_file,
    refuse,
)
from rlhf_megatron.distributed.agreement import nothing, together
from rlhf_megatron.errors import UserError

WHAT = "checkpoint"


@dataclass
class _Opening:
    """What the ranks tell each other where a save begins."""

    plans_are_kept: list[bool]
    token: str = ""
    """Of the folder's name, by the first rank."""
    error: str = ""
    """Of the first rank, which has made the folders."""


@dataclass(frozen=True)
class _Written:
    """What the ranks tell each other where it ends."""

    error: str
    records: dict[str, FileRecord]


class TrainingSave:
    """See the module's docstring. All methods but `is_written` and `begin` are collective."""

    def __init__(
        self,
        checkpoints: Path,
        *,
        step: int,
        plans: Mapping[str, SavePlans],
        num_bytes: int,
        group: dist.ProcessGroup,
        rank: int,
        validate: bool = True,
    ) -> None:
        """Make the folders that are written into. Raises UserError on all ranks where that fails,
        or where less than `num_bytes` are free.

        plans: for each directory those of the saves before. validate: see compat.plan_save; the
        parts are the same in every save of a run.
        """
        self.step, self._validate, self._plans = step, validate, plans
        self._group, self._rank = group, rank
        self._requests: list[Any] = []
        self._records: dict[str, FileRecord] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self.folder = checkpoints

        def open_folder(token: str) -> None:
            self.folder = temporary_folder(checkpoints, step=step, token=token)
            check_free_space(self.folder, num_bytes=num_bytes)
            self._make_directories()

        own = _Opening(plans_are_kept=[plan.are_kept for plan in plans.values()])
        if rank == 0:
            own.token = os.urandom(3).hex()
            own.error = _error_of(lambda: open_folder(own.token))
        ranks: list[_Opening] = [own] * dist.get_world_size(group)
        dist.all_gather_object(ranks, own, group=group)
        self.folder = temporary_folder(checkpoints, step=step, token=ranks[0].token)
        if ranks[0].error:
            self._remove()
            raise UserError(f"{WHAT}: {ranks[0].error}")
        for number, plan in enumerate(plans.values()):
            # A rank that leaves out the agreement would leave the others waiting in it.
            if not all(of_rank.plans_are_kept[number] for of_rank in ranks):
                plan.forget_agreement()

    def plan(self, directory: str, *, state: dict[str, Any]) -> None:
        """Plan one of the directories. `state`'s tensors must not change until `finish`."""
        try:
            request = plan_save(
                state,
                directory=self.folder / directory,
                plans=self._plans[directory],
                validate=self._validate,
            )
        except OSError as error:  # of rank 0's small files: the others wait within Megatron-Core
            raise self._failure(error) from error
        self._requests.append(request)

    def begin(self, own_files: Mapping[str, Any]) -> None:
        """Start to write, in a thread of its own. own_files: this rank's alone, for torch.save."""
        self._thread = threading.Thread(
            target=self._write, args=(dict(own_files),), name="checkpoint-writer", daemon=True
        )
        self._thread.start()

    def is_written(self) -> bool:
        """Whether this rank's writer is done, or has failed."""
        return self._thread is not None and not self._thread.is_alive()

    def finish(self, manifest: TrainingManifest, *, small_files: Callable[[Path], None]) -> Path:
        """Wait for the writers, verify what they wrote, and make the checkpoint current.

        manifest: without files. small_files: writes rank 0's into the folder. Returns the new
        checkpoint. Raises UserError on all ranks where any could not write; nothing is left then.
        """
        assert self._thread is not None, "finish() before begin()"
        self._thread.join()
        own = _Written(_error_of(self._raise_error), self._records)
        ranks = [own] * dist.get_world_size(self._group)
        dist.all_gather_object(ranks, own, group=self._group)
        errors = dict.fromkeys(written.error for written in ranks if written.error)
        try:
            if errors:
                raise UserError(f"{WHAT}: {'; '.join(errors)}")
            for request in self._requests:
                try:
                    finish_save(request)
                except OSError as error:
                    raise self._failure(error) from error
            files = {name: record for part in ranks for name, record in part.records.items()}
            self._on_first_rank(
                lambda: self._complete(manifest, files=files, small_files=small_files)
            )
        except BaseException:
            self._remove()
            raise
        return self.folder.with_name(self.folder.name.partition(".")[0])

    def _make_directories(self) -> None:
        """On all ranks: other nodes may not see a new folder of a network file system at once."""
        for name in self._plans:
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    def _remove(self) -> None:
        if self._rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, own_files: dict[str, Any]) -> None:
        try:
            self._make_directories()
            paths = [path for request in self._requests for path in write_files(request)]
            for name, content in own_files.items():
                paths.append(_write_small(self.folder / name, content=_saved(content)))
            self._records = {
                path.relative_to(self.folder).as_posix(): record_file(path) for path in paths
            }
        except BaseException as error:  # shown by `finish`, on all ranks
            self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._failure(self._error) from self._error

    def _failure(self, error: BaseException) -> UserError:
        """torch hides what the system said behind a fault of its archive writer."""
        text = str(_first_os_error(error) or error)
        try:
            free = shutil.disk_usage(self.folder.parent).free
        except OSError:
            return UserError(f"{self.folder}: cannot be written: {text}")
        return UserError(
            f"{self.folder}: cannot be written: {text}; {free / 1e6:,.1f} MB free there"
        )

    def _on_first_rank(self, action: Callable[[], None]) -> None:
        together(action if self._rank == 0 else nothing, group=self._group, what=WHAT)

    def _complete(
        self,
        manifest: TrainingManifest,
        *,
        files: dict[str, FileRecord],
        small_files: Callable[[Path], None],
    ) -> None:
        small_files(self.folder)
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and name not in files:
                files[name] = record_file(path)
                _sync(path)
        manifest = replace(manifest, files=dict(sorted(files.items())))
        manifest.write(self.folder)
        problems = missing_or_resized(self.folder, manifest=manifest)
        if problems:  # a rank's file is not on this rank's disk
            raise refuse(self.folder, problems=problems)
        _sync(self.folder / "manifest.json")
        make_current(self.folder)


def _error_of(action: Callable[[], None]) -> str:
    """What a user has to mend so that the action succeeds; "" where it does."""
    try:
        action()
    except (UserError, OSError) as error:
        return str(error) or repr(error)
    return ""


def _first_os_error(error: BaseException | None) -> OSError | None:
    """The error of the operating system that led to `error`, if one did."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None


def utc_now() -> str:
    """ISO 8601 to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _saved(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _write_small(path: Path, *, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return path


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
