"""The weight files of a Hugging Face directory: what is in them, and slices of it."""

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.boxes import Box

_ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16,
    "I16": 16, "U16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Read:
    """One box to read of the tensor `name`, as the files call it."""

    name: str
    box: Box


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    shape: tuple[int, ...]
    num_bytes: int


class WeightFiles(ABC):
    """Tensors by name over one or more files. `shapes` is known without reading the weights."""

    shapes: dict[str, tuple[int, ...]]
    problems: list[str]
    """Files that are missing or damaged. Empty where all can be read."""
    lost: frozenset[str]
    """Tensors that the index places in such files."""
    num_bytes: int
    """Of all tensors."""

    @abstractmethod
    def read(self, reads: Iterable[Read]) -> Iterator[tuple[Read, Tensor]]:
        """Read each slice, file by file: one file is open at a time."""


def open_weight_files(directory: str | Path) -> WeightFiles:
    """Safetensors where there are any, else PyTorch's `.bin` files; sharded with an index, or one.

    Files that are missing, truncated or damaged are listed in `problems` of what it returns. Raises
    UserError where there are no weights, or no readable index of them.
    """
    directory = Path(directory)
    for stem, suffix, kind in (
        ("model", "safetensors", _SafetensorsFiles),
        ("pytorch_model", "bin", _TorchFiles),
    ):
        index = directory / f"{stem}.{suffix}.index.json"
        single = directory / f"{stem}.{suffix}"
        if index.exists():
            return kind(_read_index(index), index=index)
        if single.exists():
            return kind({single: []}, index=None)
    raise UserError(
        f"{directory}: no weights found; expected model.safetensors, pytorch_model.bin, or one of"
        " their index files with the shards beside it"
    )


def _read_index(index: Path) -> dict[Path, list[str]]:
    """Files and the tensors that the index places in them."""
    found: dict[Path, list[str]] = {}
    try:
        for name, file in sorted(json.loads(index.read_text())["weight_map"].items()):
            found.setdefault(index.parent / file, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not a readable index with a weight_map: {error!r}") from None
    return dict(sorted(found.items()))


class _Files(WeightFiles):
    """What both kinds of files share: the pass over all of them."""

    def __init__(self, files: Mapping[Path, list[str]], *, index: Path | None) -> None:
        self.shapes, self.problems, self.num_bytes = {}, [], 0
        self._file_of: dict[str, Path] = {}
        lost: list[str] = []
        missing = [path.name for path in files if not path.exists()]
        if missing:
            self.problems.append(f"{index}: files named in it are missing: {', '.join(missing)}")
        for path, names in files.items():
            try:
                found = self._contents(path) if path.exists() else None
            except UserError as error:
                self.problems.append(str(error))
                found = None
            if found is None:
                lost += names
                continue
            self.shapes |= {name: entry.shape for name, entry in found.items()}
            self.num_bytes += sum(entry.num_bytes for entry in found.values())
            self._file_of |= dict.fromkeys(found, path)
        self.lost = frozenset(lost)

    @abstractmethod
    def _contents(self, path: Path) -> dict[str, Entry]:
        """The tensors of one file. Raises UserError where it is truncated or damaged."""


class _SafetensorsFiles(_Files):
    def _contents(self, path: Path) -> dict[str, Entry]:
        return read_safetensors_header(path)

    def read(self, reads: Iterable[Read]) -> Iterator[tuple[Read, Tensor]]:
        for path, wanted in _by_file(reads, self._file_of).items():
            with safe_open(path, framework="pt") as file:
                for read in wanted:
                    yield read, file.get_slice(read.name)[read.box.slices()]


class _TorchFiles(_Files):
    def _contents(self, path: Path) -> dict[str, Entry]:
        return {
            name: Entry(tuple(tensor.shape), tensor.numel() * tensor.element_size())
            for name, tensor in _load_torch(path).items()
        }

    def read(self, reads: Iterable[Read]) -> Iterator[tuple[Read, Tensor]]:
        for path, wanted in _by_file(reads, self._file_of).items():
            tensors = _load_torch(path)
            for read in wanted:
                yield read, tensors[read.name][read.box.slices()]


def read_safetensors_header(path: Path) -> dict[str, Entry]:
    """Names, shapes and sizes; the file's size is checked against them.

    Format: 8 bytes little-endian length of a JSON header, the header, the data. Raises UserError
    for a truncated or damaged file.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            size = path.stat().st_size
            if length > size:
                raise ValueError("the header reaches beyond the file")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != size:
            raise ValueError(f"the file has {size} bytes, its header describes {end}")
        found = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            if 8 * (last - first) != prod(entry["shape"]) * _ITEM_BITS[entry["dtype"]]:
                raise ValueError(f"the size of {name} does not fit its shape and dtype")
            found[name] = Entry(tuple(entry["shape"]), last - first)
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UserError(f"{path}: truncated or damaged safetensors file: {error}") from None


def _load_torch(path: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds; all mean that the file is unusable
        raise UserError(f"{path}: truncated or damaged PyTorch file: {error}") from None
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, Tensor)}


def _by_file(reads: Iterable[Read], file_of: dict[str, Path]) -> dict[Path, list[Read]]:
    found: dict[Path, list[Read]] = {}
    for read in reads:
        found.setdefault(file_of[read.name], []).append(read)
    return found
