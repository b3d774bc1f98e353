"""Going on from a checkpoint: which one, whether it is whole and fits, and what of the run's files
belongs to later steps."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rlhf_megatron.architectures import read_architectures
from rlhf_megatron.checkpoint.step_folders import (
    LATEST,
    current_checkpoint,
    go_back,
    remove_leftovers,
    step_of,
)
from rlhf_megatron.checkpoint.training_manifest import (
    TrainingManifest,
    damaged,
    missing_or_resized,
    read_training_manifest,
    refuse,
    share_of,
)
from rlhf_megatron.config import Config, plain_config
from rlhf_megatron.distributed.agreement import nothing, together
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.errors import UserError
from rlhf_megatron.evaluation import EVALUATIONS_FILE
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.resolve import parallel_layout
from rlhf_megatron.shared_backbone import trained_roles
from rlhf_megatron.validation import METRICS_FILE, goes_on_in, is_restart

logger = logging.getLogger(__name__)

STATE = "state.json"
LINES_BY_STEP = (METRICS_FILE, "ledger.jsonl", EVALUATIONS_FILE)
MOST_PROBLEMS_SHOWN = 20

_MUST_NOT_CHANGE = (
    "actor.precision",
    "critic.precision",
    "critic.shared_backbone",
    "run.seed",
    "data.shuffle",
)
_BEFORE_THE_KEY = {"critic.shared_backbone": False}
"""What a checkpoint has that was written before there was the key."""
_OF_NO_CONSEQUENCE = ("run.", "checkpoint.", "logging.", "export.", "distributed.")
_LAYOUT = (
    "actor.parallel.",
    "critic.parallel.",
    "ref.parallel.",
    "reward.parallel.",
    "rollout.tensor_parallel_size",
    "rollout.engines",
    "rollout.ranks",
    "placement",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A checkpoint that is whole, undamaged and fits the configuration."""

    folder: Path
    manifest: TrainingManifest
    state: Mapping[str, Any]
    in_place: bool
    """Of the run in run.output_dir, which is gone on with there."""
    same_layout: bool
    notes: tuple[str, ...]
    """What differs from the run that wrote it, a line each."""

    @property
    def step(self) -> int:
        return self.manifest.step


def find_resume_point(config: Config, *, context: DistributedContext) -> ResumePoint | None:
    """The checkpoint to go on from, read through and checked by all ranks; None for a new run.

    Collective over the job. Raises UserError, the same on all ranks, for a checkpoint that is
    missing, incomplete, damaged or of another model or run; no other one is taken in its place.
    """
    chosen: list[Path | None] = [None]

    def choose() -> None:
        chosen[0] = choose_checkpoint(config)

    group = context.job_group
    together(choose if context.rank == 0 else nothing, group=group, what="resume")
    dist.broadcast_object_list(chosen, src=0, group=group)
    folder = chosen[0]
    if folder is None:
        return None
    found: list[ResumePoint] = []

    def check() -> None:
        manifest = read_training_manifest(folder)
        problems = missing_or_resized(folder, manifest=manifest)
        if problems:
            raise refuse(folder, problems=problems[:MOST_PROBLEMS_SHOWN])
        point = _open(folder, manifest=manifest, config=config, context=context)
        mine = share_of(manifest, rank=context.rank, world_size=context.world_size)
        problems = damaged(folder, manifest=manifest, names=mine)
        if problems:
            raise refuse(folder, problems=problems[:MOST_PROBLEMS_SHOWN])
        found.append(point)

    together(check, group=group, what="resume")
    return found[0]


def choose_checkpoint(config: Config) -> Path | None:
    """What checkpoint.resume asks for. Raises UserError where that is not there."""
    resume = config.checkpoint.resume
    own = Path(config.run.output_dir) / "checkpoints"
    if resume == "never":
        return None
    if resume == "auto" or (is_restart() and (own / LATEST).exists()):
        return current_checkpoint(own)
    path = Path(resume)
    if step_of(path) is not None:
        return path
    for checkpoints in (path, path / "checkpoints"):
        if (checkpoints / LATEST).exists():
            return current_checkpoint(checkpoints)
    raise UserError(
        f"checkpoint.resume={resume}: no checkpoint; give a folder such as "
        "RUN/checkpoints/step_000010, or one with the marker latest in it"
    )


def _open(
    folder: Path, *, manifest: TrainingManifest, config: Config, context: DistributedContext
) -> ResumePoint:
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        written_with, models = state["config"], state["models"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / STATE}: damaged or not complete: {error!r}") from None
    own_models = describe_models(config)
    problems = [*_other_models(models, own=own_models), *_refused(written_with, config=config)]
    if problems:
        raise UserError(
            f"{folder}: of another run than the configuration describes:"
            + "".join(f"\n  - {problem}" for problem in problems)
            + "\nPut it back, or start anew with checkpoint.resume=never and another run.output_dir"
        )
    layouts = {
        name: layout_sizes(
            parallel_layout(role.parallel, world_size=context.world_size),
            world_size=context.world_size,
        )
        for name, role in trained_roles(config).items()
    }
    same = layouts == manifest.layouts and context.world_size == manifest.world_size
    notes = [*_changes(written_with, config=config)]
    if not same:
        notes.append(
            f"another layout than it was written at ({_in_words(manifest.layouts)} on "
            f"{manifest.world_size} ranks; now {_in_words(layouts)} on {context.world_size}): "
            "models, optimizers and the order of the prompts go on; the random generators restart"
        )
    output = Path(config.run.output_dir)
    return ResumePoint(
        folder=folder,
        manifest=manifest,
        state=state,
        in_place=goes_on_in(output, resume=config.checkpoint.resume),
        same_layout=same,
        notes=tuple(notes),
    )


def layout_sizes(layout: ParallelLayout, *, world_size: int) -> dict[str, int | str]:
    """What of a layout decides which rank holds what."""
    found: dict[str, int | str] = {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline_model_parallel_size,
        "data_parallel_size": layout.data_parallel_size,
        "order": "-".join(layout.order),
    }
    if len(layout.ranks) < world_size:
        found["ranks"] = ",".join(map(str, layout.ranks))
    return found


def _in_words(layouts: Mapping[str, Mapping[str, int | str]]) -> str:
    parts = {
        role: f"TP{of['tensor_model_parallel_size']} PP{of['pipeline_model_parallel_size']} "
        f"DP{of['data_parallel_size']}{f' on ranks {ranks}' if (ranks := of.get('ranks')) else ''}"
        for role, of in layouts.items()
    }
    if len(set(parts.values())) == 1:
        return next(iter(parts.values()))
    return ", ".join(f"{role} {text}" for role, text in parts.items())


def describe_models(config: Config) -> dict[str, Any]:
    """What must be the same for a checkpoint to fit: architectures, tokenizer, and the files that
    the reference is read from (names and sizes)."""
    architectures = read_architectures(config)
    found: dict[str, Any] = {}
    for role in trained_roles(config):
        arch = asdict(getattr(architectures, role))
        # What a checkpoint does not depend on: how the starting weights were stored.
        for name in ("dtype", "head", "num_labels", "eos_token_ids"):
            arch.pop(name)
        found[role] = json.loads(json.dumps(arch))
    found["tokenizer"] = _digest(Path(config.data.tokenizer or config.actor.model))
    # After a supervised warm-up the reference is in the checkpoint itself.
    if config.ppo.kl.place != "off" and (config.ref.model or config.warmup.steps == 0):
        found["reference"] = {
            path.name: path.stat().st_size
            for path in sorted(Path(config.ref.model or config.actor.model).glob("*.safetensors"))
        }
    return found


def _digest(tokenizer: Path) -> str:
    digest = hashlib.sha256()
    if tokenizer.is_file():
        digest.update(tokenizer.read_bytes())
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            digest.update(name.encode() + (tokenizer / name).read_bytes())
    return digest.hexdigest()


def _other_models(written: Mapping[str, Any], *, own: Mapping[str, Any]) -> Iterator[str]:
    for role in (name for name in ("actor", "critic") if name in own and name in written):
        before, now = written[role], own[role]
        differing = [
            f"{name} {before.get(name)} -> {now[name]}"
            for name in now
            if before.get(name) != now[name]
        ]
        if differing:
            yield f"another {role} model: {', '.join(differing)}"
    if written.get("tokenizer") != own["tokenizer"]:
        yield "another tokenizer (data.tokenizer, or that of actor.model)"
    if (
        "reference" in written
        and own.get("reference", written["reference"]) != (written["reference"])
    ):
        yield "the reference's weights (ref.model, or actor.model) are other files"


def _refused(written: Mapping[str, Any], *, config: Config) -> Iterator[str]:
    before, now = flat(written), flat(plain_config(config))
    for key in _MUST_NOT_CHANGE:
        written_value = before.get(key, _BEFORE_THE_KEY.get(key))
        if written_value != now.get(key):
            yield f"{key}: {written_value} -> {now.get(key)}"


def _changes(written: Mapping[str, Any], *, config: Config) -> Iterator[str]:
    before, now = flat(written), flat(plain_config(config))
    for key in sorted(before.keys() | now.keys()):
        if key.startswith((*_OF_NO_CONSEQUENCE, *_LAYOUT)) and key != "run.steps":
            continue
        if before.get(key) != now.get(key):
            yield f"{key} changed since: {before.get(key)} -> {now.get(key)}"


def flat(tree: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """key.path -> value."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, prefix=f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def cut_back(point: ResumePoint, *, output_dir: Path) -> None:
    """Remove what the run folder holds of steps after the checkpoint's; on rank 0 only."""
    step = point.step
    for name in LINES_BY_STEP:
        path = output_dir / name
        if path.exists():
            _keep_lines(path, last_step=step)
    for path in (output_dir / "rollouts").glob("step_*"):
        number = path.name.removeprefix("step_").partition(".")[0]
        if path.suffix == ".partial" or (number.isdigit() and int(number) > step):
            path.unlink()
    remove_leftovers(point.folder.parent)
    later = go_back(point.folder)
    if later:
        logger.warning("removed later checkpoints: %s", ", ".join(path.name for path in later))


def _keep_lines(path: Path, *, last_step: int) -> None:
    kept, dropped = [], 0
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            keep = line.endswith("\n") and json.loads(line)["step"] <= last_step
        except (ValueError, KeyError, TypeError):  # half a line, as a killed job leaves
            keep = False
        if keep:
            kept.append(line)
        else:
            dropped += 1
    if dropped:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, path)


def note_lines(point: ResumePoint) -> list[str]:
    """What the run says as it goes on."""
    versions = {name: v for name, v in point.manifest.versions.items() if v}
    with_what = ", ".join(f"{name} {version}" for name, version in versions.items())
    return [f"resuming from {point.folder}, step {point.step} ({with_what})"] + [
        f"  {note}" for note in point.notes
    ]


def sizes_of(
    layouts: Mapping[str, ParallelLayout], *, world_size: int
) -> dict[str, dict[str, int | str]]:
    """For the manifest."""
    return {role: layout_sizes(layout, world_size=world_size) for role, layout in layouts.items()}
