"""From a sharded checkpoint to a Hugging Face directory, in a stream, by any number of processes.

No model is built and no weight travels between processes: each reads the stored pieces of its own
parameters, each of them once, and writes their tensors into their places in the files.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.checkpoint.hf_config_write import write_config_files
from rlhf_megatron.checkpoint.manifest import RoleCheckpoint
from rlhf_megatron.checkpoint.safetensors_stream import FileLayout, RegionWriter, file_layout
from rlhf_megatron.checkpoint.sharded_files import (
    Parameter,
    Stored,
    StoredTensor,
    audit_sharded,
    model_parameters,
    open_sharded,
)
from rlhf_megatron.layout.boxes import Box, Placement
from rlhf_megatron.layout.tensors import logical_tensors

INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True)
class OutputFile:
    """One safetensors file and the parameters whose tensors it holds."""

    name: str
    layout: FileLayout
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class ExportPlan:
    """What a checkpoint becomes."""

    checkpoint: RoleCheckpoint
    stored: dict[str, StoredTensor]
    shapes: dict[str, tuple[int, ...]]
    """Of all tensors to be written."""
    dtype: torch.dtype
    files: tuple[OutputFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.layout.num_bytes for file in self.files)


@dataclass(frozen=True)
class Part:
    """What one process does: parameters and the file of each."""

    work: tuple[tuple[OutputFile, Parameter], ...]


def plan_export(checkpoint: RoleCheckpoint, *, max_shard_bytes: float) -> ExportPlan:
    """Open and audit the weights, and deal the tensors out to files of at most `max_shard_bytes`
    (a larger parameter has one to itself). Raises UserError, the same on all ranks."""
    arch = checkpoint.arch
    directory = checkpoint.folder.weights
    stored = open_sharded(directory)
    parameters = model_parameters(arch, head=checkpoint.manifest.head, stored=stored)
    audit_sharded(directory, stored=stored, parameters=parameters, num_layers=arch.num_layers)
    dtype = getattr(torch, checkpoint.manifest.dtype)
    exported = logical_tensors(arch, head=checkpoint.exports)
    shapes = {tensor.name: tensor.shape for tensor in exported}
    parameters = [p for p in parameters if shapes.keys() >= set(tensors_of(p))]
    groups: list[list[Parameter]] = [[]]
    filled = 0
    for parameter in parameters:
        size = parameter_bytes(parameter, shapes=shapes, dtype=dtype)
        if groups[-1] and filled + size > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += size
    files = tuple(
        _output_file(group, number=number, count=len(groups), shapes=shapes, dtype=dtype)
        for number, group in enumerate(groups, start=1)
    )
    return ExportPlan(checkpoint, stored, shapes, dtype, files)


def _output_file(
    group: list[Parameter],
    *,
    number: int,
    count: int,
    shapes: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> OutputFile:
    name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
    names = {tensor: shapes[tensor] for parameter in group for tensor in tensors_of(parameter)}
    return OutputFile(name, file_layout(names, dtype=dtype), tuple(group))


def tensors_of(parameter: Parameter) -> list[str]:
    """Names of the logical tensors in a parameter, in order."""
    return list(dict.fromkeys(placement.tensor for placement in parameter.placements))


def parameter_bytes(
    parameter: Parameter, *, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> int:
    """Of the tensors in a parameter, as they are written."""
    return sum(prod(shapes[name]) for name in tensors_of(parameter)) * dtype.itemsize


def split_export(plan: ExportPlan, *, rank: int, world_size: int, ranks_per_node: int) -> Part:
    """This rank's part: about the same bytes for each. A file is written from one node only, since
    not every network file system keeps writes of two nodes to one file apart."""
    nodes = -(-world_size // ranks_per_node)
    loads = [0] * world_size
    mine = []
    for number, file in enumerate(plan.files):
        node = number % nodes
        writers = range(node * ranks_per_node, min((node + 1) * ranks_per_node, world_size))
        sized = [
            (parameter_bytes(p, shapes=plan.shapes, dtype=plan.dtype), p) for p in file.parameters
        ]
        for size, parameter in sorted(sized, key=lambda item: -item[0]):
            writer = min(writers, key=lambda candidate: loads[candidate])
            loads[writer] += size
            if writer == rank:
                mine.append((file, parameter))
    return Part(tuple(mine))


def create_files(folder: Path, *, plan: ExportPlan) -> None:
    """Everything but the weights: small files, index, and files of the right size. On one rank."""
    checkpoint = plan.checkpoint
    write_config_files(
        folder,
        template_dir=checkpoint.folder.hf,
        arch=checkpoint.arch,
        head=checkpoint.exports,
        dtype=checkpoint.manifest.dtype,
    )
    for file in plan.files:
        file.layout.create(folder / file.name)
    if len(plan.files) > 1:
        weight_map = {name: file.name for file in plan.files for name in file.layout.starts}
        total = sum(prod(shape) for shape in plan.shapes.values()) * plan.dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def write_part(folder: Path, *, plan: ExportPlan, part: Part, wrote: Callable[[int], None]) -> int:
    """Write this rank's tensors, calling `wrote` with the bytes of each write, and see them onto
    the disk. Returns the bytes of the pieces read. Raises UserError for a damaged piece, OSError
    where the files cannot be written."""
    bytes_read = 0

    def read(piece: Stored) -> Tensor:
        nonlocal bytes_read
        value = piece.read()
        bytes_read += value.numel() * value.element_size()
        return value

    with RegionWriter() as writer:
        for file, parameter in part.work:
            path = folder / file.name
            assembled: dict[str, Tensor] = {}
            for name, box, value in _boxes(parameter, stored=plan.stored[parameter.key], read=read):
                value = value.to(plan.dtype)
                shape = plan.shapes[name]
                if box.shape[1:] == shape[1:]:  # whole rows: they have one place in the file
                    rows = box.start[0] * prod(shape[1:]) * plan.dtype.itemsize
                    position = file.layout.starts[name] + rows
                    wrote(writer.write(path, position=position, tensor=value))
                else:
                    if name not in assembled:
                        assembled[name] = torch.empty(shape, dtype=plan.dtype)
                    assembled[name][box.slices()] = value
            for name, tensor in assembled.items():
                wrote(writer.write(path, position=file.layout.starts[name], tensor=tensor))
        writer.flush()
    return bytes_read


def _boxes(
    parameter: Parameter, *, stored: StoredTensor, read: Callable[[Stored], Tensor]
) -> Iterator[tuple[str, Box, Tensor]]:
    """The logical boxes of a parameter and their values, reading each stored piece once."""
    for piece in stored.pieces:
        box = _in_parameter(piece.box, layer=parameter.layer)
        if box is None:
            continue
        value = None
        for placement in parameter.placements:
            common = box.intersect(_region(placement))
            if common is None:
                continue
            if value is None:
                value = read(piece)
                if parameter.layer is not None:
                    value = value[parameter.layer - piece.box.start[0]]
            yield (
                placement.tensor,
                _logical(placement, common),
                value[common.slices(origin=box.start)],
            )


def _in_parameter(box: Box, *, layer: int | None) -> Box | None:
    """A piece's box without the axis of layers; None where it has nothing of the layer."""
    if layer is None:
        return box
    if not box.start[0] <= layer < box.stop[0]:
        return None
    return Box(box.start[1:], box.stop[1:])


def _region(placement: Placement) -> Box:
    """Where the placement lies in its parameter."""
    stop = tuple(o + n for o, n in zip(placement.offset, placement.box.shape, strict=True))
    return Box(placement.offset, stop)


def _logical(placement: Placement, region: Box) -> Box:
    """The box of the logical tensor that lies at `region` of the parameter."""
    shift = [s - o for s, o in zip(placement.box.start, placement.offset, strict=True)]
    return Box(
        tuple(a + d for a, d in zip(region.start, shift, strict=True)),
        tuple(b + d for b, d in zip(region.stop, shift, strict=True)),
    )
