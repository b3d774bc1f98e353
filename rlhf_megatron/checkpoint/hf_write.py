"""Export to a Hugging Face directory: a reshard whose target layout is files of whole tensors."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlhf_megatron.checkpoint.hf_config_write import write_config_files
from rlhf_megatron.checkpoint.output import shared_output
from rlhf_megatron.distributed.agreement import nothing, together
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import LogicalTensor, RankLayout
from rlhf_megatron.layout.cuts import whole
from rlhf_megatron.layout.tensors import Head, logical_tensors
from rlhf_megatron.reshard.execute import Resharder
from rlhf_megatron.reshard.plan import BUCKETS_IN_FLIGHT, make_plan

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Shard:
    """One safetensors file and the rank that writes it."""

    file_name: str
    writer: int
    tensors: tuple[LogicalTensor, ...]


def export_hf(
    output_dir: str | Path,
    *,
    arch: ModelArchitecture,
    head: Head,
    layouts: Mapping[int, RankLayout],
    parameters: Mapping[str, Tensor],
    rank: int,
    group: dist.ProcessGroup,
    template_dir: str | Path,
    dtype: torch.dtype,
    device: torch.device | None = None,
    max_shard_bytes: float = 5e9,
    bucket_bytes: int = 256_000_000,
    overwrite: bool = False,
) -> None:
    """Write the model as safetensors with config and tokenizer files of `template_dir`.

    Collective over `group`, whose ranks include all of `layouts` (global ranks) and share the file
    system. Each rank writes every group-size-th file and holds one file's tensors in host memory;
    `device` (default: the parameters') holds the transfer buffers. Written beside `output_dir` and
    renamed when complete; replaces an existing directory only with `overwrite`. Raises UserError on
    all ranks otherwise, or where any rank cannot write; nothing half-written is left.
    """
    output, template = Path(output_dir), Path(template_dir)
    ranks = dist.get_process_group_ranks(group)
    first = rank == ranks[0]
    shards = plan_shards(
        logical_tensors(arch, head=head),
        itemsize_bytes=dtype.itemsize,
        max_shard_bytes=max_shard_bytes,
        writers=ranks,
    )

    def write_small_files(folder: Path) -> None:
        name = str(dtype).removeprefix("torch.")
        write_config_files(folder, template_dir=template, arch=arch, head=head, dtype=name)
        if len(shards) > 1:
            _write_index(folder, shards=shards, itemsize_bytes=dtype.itemsize)

    with shared_output(output, overwrite=overwrite, group=group, what="export") as folder:
        together(
            (lambda: write_small_files(folder)) if first else nothing, group=group, what="export"
        )
        for start in range(0, len(shards), len(ranks)):
            batch = shards[start : start + len(ranks)]
            mine = next((shard for shard in batch if shard.writer == rank), None)
            tensors = _gather(
                batch,
                layouts=layouts,
                parameters=parameters,
                rank=rank,
                group=group,
                dtype=dtype,
                device=device or _device_of(parameters, group=group),
                bucket_bytes=bucket_bytes,
            )
            together(_saver(folder, mine=mine, tensors=tensors), group=group, what="export")


def plan_shards(
    tensors: list[LogicalTensor],
    *,
    itemsize_bytes: int,
    max_shard_bytes: float,
    writers: list[int],
) -> list[Shard]:
    """Fill files in order, up to `max_shard_bytes` each (a larger tensor has one to itself)."""
    groups: list[list[LogicalTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = prod(tensor.shape) * itemsize_bytes
        if groups[-1] and filled + size > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    count = len(groups)
    return [
        Shard(
            "model.safetensors"
            if count == 1
            else f"model-{number + 1:05d}-of-{count:05d}.safetensors",
            writers[number % len(writers)],
            tuple(group),
        )
        for number, group in enumerate(groups)
    ]


def _gather(
    batch: list[Shard],
    *,
    layouts: Mapping[int, RankLayout],
    parameters: Mapping[str, Tensor],
    rank: int,
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
    bucket_bytes: int,
) -> dict[str, Tensor]:
    """The tensors of this rank's file, in host memory; empty where it writes none."""
    names = {tensor.name for shard in batch for tensor in shard.tensors}
    shared = {id(layout): layout for layout in layouts.values()}
    reduced = {
        key: tuple(placement for placement in layout if placement.tensor in names)
        for key, layout in shared.items()
    }
    source = {holder: reduced[id(layout)] for holder, layout in layouts.items()}
    target = {
        shard.writer: tuple(whole(tensor, parameter=tensor.name) for tensor in shard.tensors)
        for shard in batch
    }
    tensors = {
        tensor.name: torch.empty(tensor.shape, dtype=dtype)
        for shard in batch
        if shard.writer == rank
        for tensor in shard.tensors
    }
    plan = make_plan(
        source,
        target,
        itemsize_bytes=dtype.itemsize,
        bucket_bytes=max(1, bucket_bytes // BUCKETS_IN_FLIGHT),
        ranks=[rank],
    )
    Resharder(
        plan,
        rank=rank,
        group=group,
        source=parameters,
        target=tensors,
        dtype=dtype,
        device=device,
    ).run()
    return tensors


def _device_of(parameters: Mapping[str, Tensor], *, group: dist.ProcessGroup) -> torch.device:
    """Where the parameters are; a rank without any takes what the group can move."""
    for parameter in parameters.values():
        return parameter.device
    on_gpu = "nccl" in dist.get_backend_config(group)  # of the job: cpu:gloo,cuda:nccl
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _saver(partial: Path, *, mine: Shard | None, tensors: dict[str, Tensor]) -> Callable[[], None]:
    def save() -> None:
        if mine is not None:
            try:
                save_file(tensors, partial / mine.file_name, metadata={"format": "pt"})
            except SafetensorError as error:  # what a full disk is to the library
                raise OSError(f"{mine.file_name}: {error}") from error

    return save


def _write_index(partial: Path, *, shards: list[Shard], itemsize_bytes: int) -> None:
    everything = [tensor for shard in shards for tensor in shard.tensors]
    total = sum(prod(tensor.shape) * itemsize_bytes for tensor in everything)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {
            tensor.name: shard.file_name for shard in shards for tensor in shard.tensors
        },
    }
    (partial / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
