"""The three conversions, each collective over a job's ranks, which share a file system:

import_hf       a Hugging Face directory  -> a sharded checkpoint
convert         a sharded checkpoint      -> the same at another parallel layout
export_sharded  a sharded checkpoint      -> a Hugging Face directory
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_megatron.checkpoint.export_sharded import (
    create_files,
    plan_export,
    split_export,
    write_part,
)
from rlhf_megatron.checkpoint.hf_config_write import write_config_files
from rlhf_megatron.checkpoint.hf_read import load_hf_checkpoint
from rlhf_megatron.checkpoint.layout_check import check_layout
from rlhf_megatron.checkpoint.manifest import (
    HEADS,
    Manifest,
    RoleCheckpoint,
    installed_versions,
    open_role,
    open_role_for_export,
)
from rlhf_megatron.checkpoint.output import shared_output
from rlhf_megatron.checkpoint.paths import RoleFolder, check_free_space
from rlhf_megatron.checkpoint.progress import Progress, folder_bytes
from rlhf_megatron.checkpoint.sharded import load_weights, save_weights, saved_parameters
from rlhf_megatron.distributed.agreement import nothing, together
from rlhf_megatron.distributed.groups import GroupFactory, build_role_groups
from rlhf_megatron.layout.architecture import ModelArchitecture, read_architecture
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.sizes import num_parameters
from rlhf_megatron.layout.tensors import Head
from rlhf_megatron.models.build import RoleModel, build_model

TIMEOUT_SECONDS = 1800.0
PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
"""By the torch dtype's name: what a sharded checkpoint may hold."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What this rank read."""

    bytes_read: int
    value_head_loaded: bool


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What this rank read."""

    bytes_read: int


def import_hf(
    model: str | Path,
    *,
    output: str | Path,
    role: str,
    layout: ParallelLayout,
    dtype: str,
    overwrite: bool = False,
) -> ImportReport:
    """Write `output`/`role` from a Hugging Face directory, at `layout` over all ranks of the job.

    Each rank reads the slices that it writes: over all ranks, every byte once. `dtype`: name of the
    torch dtype to hold the weights in. Raises UserError, the same on all ranks, for whatever is
    wrong with the model or the output; nothing half-written is left.
    """
    model, output, head = Path(model), Path(output), HEADS[role]
    arch = read_architecture(model)
    check_layout(arch, layout=layout)
    part = _empty_model(arch, head=head, layout=layout, dtype=dtype)
    parameters = part.parameters()
    written = saved_parameters(part)
    count = num_parameters(arch, head=head)
    with Progress(
        "reading", total_bytes=count * getattr(torch, arch.dtype).itemsize, rank=dist.get_rank()
    ) as progress:
        report = load_hf_checkpoint(
            model,
            layout=tuple(p for p in part.rank_layout(dist.get_rank()) if p.parameter in written),
            parameters=parameters,
            arch=arch,
            head=head,
            on_read=progress.add,
        )
    with shared_output(output, overwrite=overwrite, group=_everyone(), what="import") as folder:
        _write_role(
            RoleFolder(folder / role), part=part, template_dir=model, dtype=dtype, count=count
        )
    return ImportReport(bytes_read=report.bytes_read, value_head_loaded=report.value_head_loaded)


def convert(
    checkpoint: str | Path,
    *,
    output: str | Path,
    roles: list[str],
    layout: ParallelLayout,
    overwrite: bool = False,
) -> None:
    """Write `output` with the weights of `checkpoint`'s roles, at `layout` over all ranks.

    Raises UserError as `import_hf` does.
    """
    opened = [open_role(checkpoint, role=role) for role in roles]
    for role in opened:
        check_layout(role.arch, layout=layout)
    with shared_output(
        Path(output), overwrite=overwrite, group=_everyone(), what="convert"
    ) as folder:
        for name, role in zip(roles, opened, strict=True):
            _convert_role(role, target=RoleFolder(folder / name), layout=layout)


def _convert_role(role: RoleCheckpoint, *, target: RoleFolder, layout: ParallelLayout) -> None:
    manifest = role.manifest
    part = _empty_model(role.arch, head=manifest.head, layout=layout, dtype=manifest.dtype)
    load_weights(part, checkpoint=role)
    _write_role(
        target,
        part=part,
        template_dir=role.folder.hf,
        dtype=manifest.dtype,
        count=manifest.num_parameters,
    )


def export_sharded(
    checkpoint: str | Path,
    *,
    output: str | Path,
    role: str | None,
    max_shard_bytes: float,
    ranks_per_node: int,
    overwrite: bool = False,
) -> ExportReport:
    """Write a role's weights as a Hugging Face directory, on any number of ranks.

    A language model, or for a value model transformers' sequence classification with one label; of
    a model with both heads, the role's.
    Raises UserError, the same on all ranks, for whatever is wrong; nothing half-written is left.
    """
    output, rank = Path(output), dist.get_rank()
    opened = open_role_for_export(checkpoint, role=role)
    plan = plan_export(opened, max_shard_bytes=max_shard_bytes)
    part = split_export(
        plan, rank=rank, world_size=dist.get_world_size(), ranks_per_node=ranks_per_node
    )

    bytes_read = 0

    def create() -> None:
        check_free_space(folder, num_bytes=plan.num_bytes)
        create_files(folder, plan=plan)

    def write() -> None:
        nonlocal bytes_read
        bytes_read = write_part(folder, plan=plan, part=part, wrote=progress.add)

    with shared_output(output, overwrite=overwrite, group=_everyone(), what="export") as folder:
        together(create if rank == 0 else nothing, group=_everyone(), what="export")
        with Progress("writing", total_bytes=plan.num_bytes, rank=rank) as progress:
            together(write, group=_everyone(), what="export")
    return ExportReport(bytes_read=bytes_read)


def _empty_model(
    arch: ModelArchitecture, *, head: Head, layout: ParallelLayout, dtype: str
) -> RoleModel:
    """This rank's part, in host memory, to be filled."""
    groups = build_role_groups(
        head, layout=layout, factory=GroupFactory(timeout_seconds=TIMEOUT_SECONDS)
    )
    assert groups is not None, "all ranks of the job take part"
    return build_model(
        arch,
        head=head,
        groups=groups,
        precision=PRECISIONS[dtype],
        layer_spec_name="local",
        device=_CPU,
        seed=0,
        initialize=False,
    )


def _write_role(
    target: RoleFolder, *, part: RoleModel, template_dir: Path, dtype: str, count: int
) -> None:
    """Small files and weights of one role, into a folder that is not there yet."""
    layout, rank = part.groups.layout, dist.get_rank()
    num_bytes = count * getattr(torch, dtype).itemsize

    def write_small_files() -> None:
        target.weights.mkdir(parents=True)
        target.hf.mkdir()
        check_free_space(target.path, num_bytes=num_bytes)
        write_config_files(
            target.hf, template_dir=template_dir, arch=part.arch, head=part.head, dtype=dtype
        )
        Manifest(
            head=part.head,
            dtype=dtype,
            num_parameters=count,
            written_at={
                "tensor_model_parallel_size": layout.tensor_model_parallel_size,
                "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
                "virtual_pipeline_model_parallel_size": (
                    layout.virtual_pipeline_model_parallel_size
                ),
            },
            versions=installed_versions(),
        ).write(target)

    together(write_small_files if rank == 0 else nothing, group=_everyone(), what="checkpoint")
    with Progress(
        "writing",
        total_bytes=num_bytes,
        rank=rank,
        done_bytes=lambda: folder_bytes(target.weights),
    ):
        save_weights(part, directory=target.weights, group=_everyone(), consume=True)


def _everyone() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world
