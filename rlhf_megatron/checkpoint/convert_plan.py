"""What the conversion tools print for --dry-run: the plan and the sizes, after all checks of the
input. Starts no processes and builds no model."""

from pathlib import Path

import torch

from rlhf_megatron.checkpoint.export_sharded import plan_export
from rlhf_megatron.checkpoint.hf_files import open_weight_files
from rlhf_megatron.checkpoint.hf_read import audit_hf
from rlhf_megatron.checkpoint.layout_check import check_layout
from rlhf_megatron.checkpoint.manifest import HEADS, KINDS, RoleCheckpoint
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.megatron import megatron_rank_layout
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.sizes import num_parameters
from rlhf_megatron.layout.tensors import Head


def describe_import(
    model: Path,
    *,
    output: Path,
    arch: ModelArchitecture,
    role: str,
    layout: ParallelLayout,
    dtype: str,
) -> str:
    """A Hugging Face directory to a sharded checkpoint. Raises UserError as the import would."""
    check_layout(arch, layout=layout)
    head = HEADS[role]
    files = open_weight_files(model)
    audit_hf(files, directory=model, arch=arch, head=head)
    return "\n".join(
        [
            f"reads   {model}: {_model(arch, head=head)}, {_megabytes(files.num_bytes)}",
            *_target(arch, head=head, output=output, layout=layout, dtype=dtype),
        ]
    )


def describe_conversion(checkpoint: RoleCheckpoint, *, output: Path, layout: ParallelLayout) -> str:
    """A role's part of a checkpoint to another layout. Raises UserError as the conversion would."""
    check_layout(checkpoint.arch, layout=layout)
    plan_export(checkpoint, max_shard_bytes=float("inf"))  # the same audit of the files
    manifest, path = checkpoint.manifest, checkpoint.folder.path
    return "\n".join(
        [
            _source(checkpoint),
            *_target(
                checkpoint.arch,
                head=manifest.head,
                output=output / path.name,
                layout=layout,
                dtype=manifest.dtype,
            ),
        ]
    )


def describe_export(checkpoint: RoleCheckpoint, *, output: Path, max_shard_bytes: float) -> str:
    """A sharded checkpoint to a Hugging Face directory. Raises UserError as the export would."""
    plan = plan_export(checkpoint, max_shard_bytes=max_shard_bytes)
    lines = [_source(checkpoint)]
    lines.append(
        f"writes  {output}: {len(plan.shapes)} tensors, {checkpoint.manifest.dtype}, "
        f"{_megabytes(plan.num_bytes)} in {len(plan.files)} files"
    )
    lines += [
        f"  {file.name}: {len(file.layout.starts)} tensors, {_megabytes(file.layout.num_bytes)}"
        for file in plan.files
    ]
    return "\n".join(lines)


def _source(checkpoint: RoleCheckpoint) -> str:
    manifest = checkpoint.manifest
    size = manifest.num_parameters * getattr(torch, manifest.dtype).itemsize
    at = manifest.written_at
    return (
        f"reads   {checkpoint.folder.path}: {_model(checkpoint.arch, head=manifest.head)}, "
        f"{_megabytes(size)}, written at TP{at.get('tensor_model_parallel_size', '?')} "
        f"PP{at.get('pipeline_model_parallel_size', '?')} "
        f"VPP{at.get('virtual_pipeline_model_parallel_size', '?')}"
    )


def _target(
    arch: ModelArchitecture, *, head: Head, output: Path, layout: ParallelLayout, dtype: str
) -> list[str]:
    itemsize = getattr(torch, dtype).itemsize
    total = num_parameters(arch, head=head) * itemsize
    lines = [
        f"writes  {output}: TP{layout.tensor_model_parallel_size} "
        f"PP{layout.pipeline_model_parallel_size} "
        f"VPP{layout.virtual_pipeline_model_parallel_size}, {len(layout.ranks)} processes, "
        f"{dtype}, {_megabytes(total)}"
    ]
    for rank in layout.ranks:
        at = layout.coordinates(rank)
        held = megatron_rank_layout(
            arch,
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            tp_rank=at.tp,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            stage=at.pp,
            head=head,
            fused_norms=False,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        )
        size = sum(placement.box.numel for placement in held) * itemsize
        lines.append(f"  rank {rank} (stage {at.pp}, shard {at.tp}) holds {_megabytes(size)}")
    return lines


def _model(arch: ModelArchitecture, *, head: Head) -> str:
    return (
        f"{arch.family} {KINDS[head]} of {arch.num_layers} layers, "
        f"{num_parameters(arch, head=head) / 1e6:,.1f} M parameters"
    )


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
