"""The files of a dist_checkpointing directory: what is in them, and pieces of it.

A reader of its own: it needs no model and no process group, reads each stored piece once, and can
say all that is wrong with a directory at once. Megatron-Core writes the format of
torch.distributed.checkpoint ("torch_dist"): `.metadata` lists, for each key, pieces of a global
tensor and where they lie in the `.distcp` files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import Box, Placement
from rlhf_megatron.layout.cells import cells
from rlhf_megatron.layout.megatron import megatron_rank_layout
from rlhf_megatron.layout.tensors import Head

_LAYERS = "decoder.layers."
_VOCAB_KEYS = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})
_NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state")
"""Beginnings of keys that a trainer's checkpoint holds beside the weights."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One piece of a key's global tensor, and where it lies."""

    box: Box
    path: Path
    offset: int
    num_bytes: int

    def read(self) -> Tensor:
        """The piece, of the box's shape. Raises UserError where the file does not hold it."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = BytesIO(file.read(self.num_bytes))
            tensor = torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many kinds; all mean that the piece is unusable
            raise UserError(f"{self.path}: truncated or damaged: {error}") from None
        if tuple(tensor.shape) != self.box.shape:
            raise UserError(f"{self.path}: holds {list(tensor.shape)}, not {list(self.box.shape)}")
        return tensor


@dataclass(frozen=True)
class StoredTensor:
    """A key: its global tensor and the pieces it is stored in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the whole model, as Megatron-Core names it on one rank, and where the
    checkpoint has it: whole under a key, or as one layer of a key that stacks all layers."""

    name: str
    key: str
    layer: int | None
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    """Without vocabulary padding."""

    @property
    def may_be_padded(self) -> bool:
        return self.key in _VOCAB_KEYS


def open_sharded(directory: Path) -> dict[str, StoredTensor]:
    """All tensors by key. Raises UserError where the directory is not complete, listing every file
    that is missing or too short."""
    if not (directory / "metadata.json").exists() or not (directory / ".metadata").exists():
        raise UserError(
            f"{directory}: no complete dist_checkpointing directory; it lacks metadata.json or"
            " .metadata, which are written last"
        )
    try:
        metadata = FileSystemReader(directory).read_metadata()
        places: dict[tuple[str, tuple[int, ...]], tuple[Path, int, int]] = {
            (index.fqn, tuple(index.offset)): (
                directory / info.relative_path,
                info.offset,
                info.length,
            )
            for index, info in metadata.storage_data.items()
            if index.offset is not None
        }
        found = {
            key: StoredTensor(
                tuple(entry.size),
                entry.properties.dtype,
                tuple(_stored(key, chunk, places) for chunk in entry.chunks),
            )
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    except Exception as error:  # unpickling raises whatever it likes
        raise UserError(f"{directory / '.metadata'}: truncated or damaged: {error!r}") from None
    problems = _file_problems(found)
    if problems:
        raise UserError("\n".join(problems))
    return found


def _stored(
    key: str,
    chunk: object,
    places: Mapping[tuple[str, tuple[int, ...]], tuple[Path, int, int]],
) -> Stored:
    start = tuple(chunk.offsets)  # type: ignore[attr-defined]
    stop = tuple(a + n for a, n in zip(start, chunk.sizes, strict=True))  # type: ignore[attr-defined]
    return Stored(Box(start, stop), *places[key, start])


def _file_problems(tensors: Mapping[str, StoredTensor]) -> list[str]:
    ends: dict[Path, int] = {}
    for tensor in tensors.values():
        for piece in tensor.pieces:
            ends[piece.path] = max(ends.get(piece.path, 0), piece.offset + piece.num_bytes)
    problems = []
    for path, end in sorted(ends.items()):
        if not path.exists():
            problems.append(f"{path}: missing")
        elif path.stat().st_size < end:
            size = path.stat().st_size
            problems.append(f"{path}: truncated: {size} bytes, of which {end} are needed")
    return problems


def model_parameters(
    arch: ModelArchitecture, *, head: Head, stored: Mapping[str, StoredTensor]
) -> list[Parameter]:
    """Where the checkpoint has each parameter of the model, in the order of the layers.

    Its global tensors are the parameters of a single rank (TP 1, PP 1), with the layer norms named
    as Transformer Engine fuses them (gpt_layer_specs.py, sharded_state_dict_keys_map); layers are
    stacked under one key, or not (non_homogeneous_layers).
    """
    layout = megatron_rank_layout(
        arch,
        tensor_model_parallel_size=1,
        tp_rank=0,
        pipeline_model_parallel_size=1,
        stage=0,
        head=head,
        fused_norms=True,
    )
    by_name: dict[str, list[Placement]] = {}
    for placement in layout:
        by_name.setdefault(placement.parameter, []).append(placement)
    return [
        _parameter(name, placements=tuple(placements), stored=stored)
        for name, placements in by_name.items()
    ]


def _parameter(
    name: str, *, placements: tuple[Placement, ...], stored: Mapping[str, StoredTensor]
) -> Parameter:
    key, layer = name, None
    if name.startswith(_LAYERS) and name not in stored:
        number, _, rest = name.removeprefix(_LAYERS).partition(".")
        key, layer = _LAYERS + rest, int(number)
    ends = [tuple(o + n for o, n in zip(p.offset, p.box.shape, strict=True)) for p in placements]
    return Parameter(name, key, layer, placements, tuple(map(max, *ends, ends[0])))


def audit_sharded(
    directory: Path,
    *,
    stored: Mapping[str, StoredTensor],
    parameters: list[Parameter],
    num_layers: int,
) -> None:
    """Raise UserError, listing every key that is missing, unknown, wrongly shaped or incomplete."""
    problems = []
    wanted = {parameter.key: parameter for parameter in parameters}
    for key, parameter in wanted.items():
        if key not in stored:
            problems.append(f"{key}: missing")
            continue
        lead = () if parameter.layer is None else (num_layers,)
        shape, expected = stored[key].shape, lead + parameter.shape
        if parameter.may_be_padded and shape[1:] == expected[1:] and shape[0] >= expected[0]:
            expected = shape
        if shape != expected:
            problems.append(f"{key}: shape {list(shape)}, expected {list(expected)}")
        else:
            covered = sum(cell.numel for cell in cells([p.box for p in stored[key].pieces]))
            whole = Box((0,) * len(shape), shape).numel
            if covered != whole:
                problems.append(f"{key}: {whole - covered} of {whole} elements are not stored")
    problems += [
        f"{key}: not a parameter of this model"
        for key in stored
        if key not in wanted and not key.startswith(_NOT_WEIGHTS)
    ]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UserError(
            f"{directory}: the weights do not fit hf/config.json: {count}\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
