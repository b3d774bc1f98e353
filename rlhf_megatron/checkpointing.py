"""When the run is saved, what is put into a checkpoint, and how a resumed run takes it up again."""

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from rlhf_megatron.checkpoint.compat import SavePlans
from rlhf_megatron.checkpoint.hf_config_write import write_config_files
from rlhf_megatron.checkpoint.host_buffers import HostBuffers
from rlhf_megatron.checkpoint.manifest import (
    Manifest,
    installed_versions,
    open_role,
    open_role_folder,
)
from rlhf_megatron.checkpoint.optimizer_slices import adam_steps
from rlhf_megatron.checkpoint.paths import RoleFolder
from rlhf_megatron.checkpoint.rng import read_rng_state, rng_state, set_rng_state
from rlhf_megatron.checkpoint.role_state import (
    captured_optimizer,
    captured_weights,
    restore_optimizer,
    role_parts,
)
from rlhf_megatron.checkpoint.sharded import load_weights
from rlhf_megatron.checkpoint.step_folders import prune
from rlhf_megatron.checkpoint.training_manifest import TrainingManifest
from rlhf_megatron.checkpoint.training_save import TrainingSave, utc_now
from rlhf_megatron.config import Config, plain_config
from rlhf_megatron.data.exchange import gather_lists
from rlhf_megatron.distributed.agreement import together
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.engine.offload import OPTIMIZER as OPTIMIZER_STATE
from rlhf_megatron.engine.offload import WEIGHTS
from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.sizes import num_parameters
from rlhf_megatron.observability.ledger import PhaseLedger, PhaseRecord
from rlhf_megatron.placed_role import PlacedRole
from rlhf_megatron.resume import (
    LINES_BY_STEP,
    STATE,
    ResumePoint,
    describe_models,
    note_lines,
    sizes_of,
)
from rlhf_megatron.run_state import RunState
from rlhf_megatron.stopping import RunStopped, StopAgreement

logger = logging.getLogger(__name__)

PHASE = "checkpoint"
REFERENCE = "ref"
OPTIMIZER = "optimizer"
"""Folder beside a role's weights/."""


class Checkpointer:
    """Saves and resumes one run. Every method is collective over the job.

    A joint PhaseListener: where a phase ends that all ranks are in, what the writers have completed
    meanwhile becomes current.
    """

    def __init__(
        self,
        config: Config,
        *,
        run: RunState,
        stop: StopAgreement,
        context: DistributedContext,
        ledger: PhaseLedger,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._options = config, config.checkpoint
        self._run, self._stop = run, stop
        self._context, self._ledger, self._say = context, ledger, say
        self._group, self._rank = context.job_group, context.rank
        self._checkpoints = Path(config.run.output_dir) / "checkpoints"
        self._buffers = {
            name: HostBuffers(device=context.device) for name in (*run.roles, REFERENCE)
        }
        here = {**run.roles, REFERENCE: run.ref} if run.ref is not None else run.roles
        self._parts = {
            name: role_parts(role.model) for name, role in here.items() if role.model is not None
        }
        directories = [f"{name}/{part}" for name in run.roles for part in ("weights", OPTIMIZER)]
        if run.ref is not None:
            directories.append(f"{REFERENCE}/weights")
        self._plans = {name: SavePlans() for name in directories}
        self._small: dict[str, Any] = {}
        """Parts and generators as they were after the last step: a step that is abandoned has
        changed nothing else."""
        self._save: tuple[TrainingSave, TrainingManifest, dict[str, Any]] | None = None
        self._pruning: threading.Thread | None = None
        self._step = 0
        self._saved_step: int | None = None
        self._num_saves = 0
        self._begun_at = time.monotonic()
        self._held_up_seconds = 0.0
        self._models = describe_models(config)
        self._plain_config = plain_config(config)
        self._run_id = self._from_first_rank(uuid.uuid4().hex[:12])

    def resume(self, point: ResumePoint) -> None:
        """Take everything over from the checkpoint. Raises UserError where something is missing."""
        for line in note_lines(point):
            self._say(line)
        state = point.state
        with _naming_versions(point):
            for name, role in self._run.roles.items():
                self._load_role(name, role=role, point=point)
            if self._run.ref is not None:
                self._load_reference(self._run.ref, point=point)
        together(lambda: self._run.load_parts(state["parts"]), group=self._group, what="resume")
        together(lambda: self._load_tensors(point), group=self._group, what="resume")
        if point.same_layout:
            path = point.folder / _rng_file(self._rank)
            set_rng_state(
                read_rng_state(path), roles=self._rng_roles(), device=self._context.device
            )
        if point.in_place:
            self._run_id = state["run_id"]
            self._saved_step = point.step
        self._step = point.step
        self._remember()

    def begins(self) -> None:
        """Before the first step."""
        self._remember()

    def phase_entered(self, *, step: int, phase: str) -> None:
        """Nothing."""

    def phase_exited(self, record: PhaseRecord) -> None:
        """Conclude the save in flight if all ranks have written. Raises UserError where any could
        not."""
        if self._save is None or record.phase == PHASE:
            return
        begin = time.monotonic()
        if not self._stop.agree([not self._save[0].is_written()])[1]:
            self._finish_save()
        self._held_up_seconds += time.monotonic() - begin

    def after_step(self, step: int) -> None:
        """Save where it is time. Raises RunStopped, once the state is saved, where the run was
        asked to stop; UserError where an earlier save has failed."""
        self._step = step
        self._remember()
        minutes = (time.monotonic() - self._begun_at) / 60
        too_long = 0 < self._options.interval_minutes <= minutes
        stop, by_time = self._stop.agree([too_long and self._rank == 0])
        interval = self._options.interval_steps
        last = step == self._config.run.steps and self._options.final
        if stop:
            self.stop()
        if last or by_time or (interval and step % interval == 0):
            self.save()

    def stop(self) -> NoReturn:
        """Save the last step's state, unless it is saved, and raise RunStopped."""
        if self._saved_step != self._step:
            self.save()
        self.finish()
        raise RunStopped(
            f"stopped by {self._stop.reason} after step {self._step}; the state is in "
            f"{self._checkpoints}, and the same command goes on from there"
        )

    def finish(self) -> None:
        """Wait until what is being written is complete and current."""
        if self._save is not None:
            with self._ledger.phase(PHASE):
                self._finish_save()
        self._wait_for_pruning()

    def take_metrics(self) -> dict[str, float]:
        """time/checkpoint_seconds: how long saving has held training up since the last call."""
        seconds, self._held_up_seconds = self._held_up_seconds, 0.0
        return {"time/checkpoint_seconds": seconds} if seconds else {}

    def save(self) -> None:
        """Save the state after the last step: return when it is copied to host memory, or with
        `asynchronous` off when it is complete."""
        begin = time.monotonic()
        with self._ledger.phase(PHASE):
            if self._save is not None:
                self._finish_save()  # its copies are about to be overwritten
            self._begun_at = time.monotonic()
            self._save = self._begin_save()
            if not self._options.asynchronous:
                self._finish_save()
        self._saved_step = self._step
        self._num_saves += 1
        self._held_up_seconds += time.monotonic() - begin

    def _remember(self) -> None:
        self._small = {
            "parts": self._run.parts_state(),
            "rng": rng_state(self._rng_roles(), device=self._context.device),
            "tensors": {name: part.tensor_state() for name, part in self._run.tensors.items()},
        }

    def _begin_save(self) -> tuple[TrainingSave, TrainingManifest, dict[str, Any]]:
        roles, ref = self._run.roles, self._run.ref
        save = TrainingSave(
            self._checkpoints,
            step=self._step,
            plans=self._plans,
            num_bytes=sum(_state_bytes(role) for role in roles.values()),
            group=self._group,
            rank=self._rank,
            validate=self._num_saves == 0,
        )
        for name, role in roles.items():
            weights, optimizer = self._captured(name, engine=role.engine)
            save.plan(f"{name}/weights", state=weights)
            save.plan(f"{name}/{OPTIMIZER}", state=optimizer)
        if ref is not None:
            weights, _ = self._captured(REFERENCE, engine=ref.engine)
            save.plan(f"{REFERENCE}/weights", state=weights)
        state = self._state()
        save.begin({_rng_file(self._rank): self._small["rng"], **self._tensor_files()})
        return save, self._manifest(), state

    def _captured(
        self, name: str, *, engine: ModelEngine | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """This rank's part of a role's weights and optimizer, in host memory; nothing where it has
        none."""
        if engine is None:
            return {}, {}
        parts, buffers, readable = self._parts[name], self._buffers[name], engine.memory.readable
        weights = captured_weights(parts, buffers=buffers, readable=readable)
        optimizer: dict[str, Any] = {}
        if engine.optimizer is not None:
            optimizer = captured_optimizer(
                parts, optimizer=engine.optimizer, buffers=buffers, readable=readable
            )
        buffers.synchronize()
        return weights, optimizer

    def _tensor_files(self) -> dict[str, Any]:
        """On rank 0: those of the parts whose state holds tensors."""
        if self._rank != 0:
            return {}
        states: dict[str, Any] = self._small["tensors"]
        return {_tensor_file(name): state for name, state in states.items() if state is not None}

    def _load_tensors(self, point: ResumePoint) -> None:
        for name, part in self._run.tensors.items():
            path = point.folder / _tensor_file(name)
            if path.exists():
                part.load_tensor_state(read_rng_state(path))

    def _finish_save(self) -> None:
        assert self._save is not None
        save, manifest, state = self._save
        self._save = None
        folder = save.finish(
            manifest, small_files=lambda folder: self._write_small_files(folder, state=state)
        )
        logger.info("wrote %s", folder)
        if self._rank == 0:
            self._prune(folder)

    def _prune(self, current: Path) -> None:
        """In the background: removing many files may take minutes on a network file system."""
        self._wait_for_pruning()
        self._pruning = threading.Thread(
            target=prune,
            args=(self._checkpoints,),
            kwargs={
                "current": current,
                "keep_last": self._options.keep_last,
                "keep_every": self._options.keep_every,
            },
            name="checkpoint-pruner",
            daemon=True,
        )
        self._pruning.start()

    def _wait_for_pruning(self) -> None:
        if self._pruning is not None:
            self._pruning.join()

    def _state(self) -> dict[str, Any]:
        steps = gather_lists(
            [
                (name, adam_steps(role.engine.optimizer))
                for name, role in self._run.roles.items()
                if role.engine is not None
            ],
            group=self._group,
        )
        return {
            "step": self._step,
            "weight_version": self._step,
            "run_id": self._run_id,
            "optimizer_steps": {name: dict(steps)[name] for name in self._run.roles},
            "parts": self._small["parts"],
            "models": self._models,
            "config": self._plain_config,
        }

    def _manifest(self) -> TrainingManifest:
        layouts = {name: role.layout for name, role in self._run.roles.items()}
        return TrainingManifest(
            step=self._step,
            run_id=self._run_id,
            written_at=utc_now(),
            world_size=self._context.world_size,
            layouts=sizes_of(layouts, world_size=self._context.world_size),
            versions=installed_versions(),
        )

    def _write_small_files(self, folder: Path, *, state: dict[str, Any]) -> None:
        """On rank 0: the state, each role's description, and the run's own files onto the disk."""
        with (folder / STATE).open("w", encoding="utf-8") as file:
            json.dump(state, file, indent=1)
        roles = dict(self._run.roles)
        if self._run.ref is not None:
            roles[REFERENCE] = self._run.ref
        for name, role in roles.items():
            self._describe_role(RoleFolder(folder / name), role=role)
        for name in LINES_BY_STEP:
            path = folder.parents[1] / name
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def _describe_role(self, folder: RoleFolder, *, role: PlacedRole) -> None:
        layout, dtype = role.layout, str(role.dtype).removeprefix("torch.")
        template = self._config.actor.model
        if role is self._run.roles.get("critic"):
            template = self._config.critic.model or template
        folder.hf.mkdir()
        write_config_files(
            folder.hf, template_dir=Path(template), arch=role.arch, head=role.head, dtype=dtype
        )
        Manifest(
            head=role.head,
            dtype=dtype,
            num_parameters=num_parameters(role.arch, head=role.head),
            written_at={
                "tensor_model_parallel_size": layout.tensor_model_parallel_size,
                "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
                "virtual_pipeline_model_parallel_size": (
                    layout.virtual_pipeline_model_parallel_size
                ),
            },
            versions=installed_versions(),
        ).write(folder)

    def _load_role(self, name: str, *, role: PlacedRole, point: ResumePoint) -> None:
        checkpoint = open_role(point.folder, role=name)
        with _on_device(role, WEIGHTS, OPTIMIZER_STATE):
            load_weights(role.model, checkpoint=checkpoint)
            if role.engine is not None:
                role.engine.weights_changed()
            with role.model.groups.active() if role.model is not None else nullcontext():
                restore_optimizer(
                    role.model,
                    optimizer=role.engine.optimizer if role.engine is not None else None,
                    checkpoint=checkpoint,
                    directory=checkpoint.folder.path / OPTIMIZER,
                    steps=point.state["optimizer_steps"][name],
                    dtype=role.dtype,
                )

    def _load_reference(self, ref: PlacedRole, *, point: ResumePoint) -> None:
        folder = RoleFolder(point.folder / REFERENCE)
        if not folder.manifest.exists():
            raise UserError(
                f"{point.folder}: holds no {REFERENCE}/, the reference after the warm-up: the run "
                "that wrote it had none (ppo.kl.place=off); set that again, or give ref.model"
            )
        with _on_device(ref, WEIGHTS):
            load_weights(ref.model, checkpoint=open_role_folder(folder))

    def _rng_roles(self) -> dict[str, Any]:
        return {
            name: role.model.groups
            for name, role in self._run.roles.items()
            if role.model is not None
        }

    def _from_first_rank(self, text: str) -> str:
        shared = [text]
        dist.broadcast_object_list(shared, src=0, group=self._group)
        return shared[0]


def _on_device(role: PlacedRole, *kinds: str) -> AbstractContextManager[None]:
    """Inside, these kinds of the role's memory are on this rank's device, to be written."""
    if role.engine is None:
        return nullcontext()
    return role.engine.memory.on_device(*kinds, writes=True)


def _state_bytes(role: PlacedRole) -> int:
    """Of a role's weights, moments and, in bf16, master weights."""
    itemsize = role.dtype.itemsize
    per_parameter = itemsize + (8 if itemsize == 4 else 12)
    return num_parameters(role.arch, head=role.head) * per_parameter


@contextmanager
def _naming_versions(point: ResumePoint) -> Iterator[None]:
    """What another Megatron-Core has written may not be readable: then say so."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        written, here = (
            v["megatron-core"] for v in (point.manifest.versions, installed_versions())
        )
        if written == here:
            raise
        raise UserError(
            f"{point.folder}: written by megatron-core {written}, and {here} cannot load it: "
            f"{error!r}"
        ) from error


def _rng_file(rank: int) -> str:
    return f"rng/rank_{rank:04d}.pt"


def _tensor_file(name: str) -> str:
    return f"{name}.pt"
