"""Import from a Hugging Face directory: each rank reads only its own slices."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from rlhf_megatron.checkpoint.hf_files import Read, WeightFiles, open_weight_files
from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import Placement, RankLayout
from rlhf_megatron.layout.tensors import VALUE_HEAD, Head, logical_tensors, vocab_tensors


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What one rank read."""

    bytes_read: int
    num_tensors: int
    """Distinct logical tensors of which this rank read something."""
    value_head_loaded: bool
    """False where a value model came from a language model: its head keeps what it had."""
    seconds: float


@torch.no_grad()
def load_hf_checkpoint(
    directory: str | Path,
    *,
    layout: RankLayout,
    parameters: Mapping[str, Tensor],
    arch: ModelArchitecture,
    head: Head,
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> LoadReport:
    """Fill this rank's parameters, converting to their dtype. No communication.

    Elements that belong to no box (vocabulary padding) become 0. `on_read` hears of the bytes of
    each slice. Raises UserError, the same on all ranks, listing every damaged file and every
    missing, unknown or wrongly shaped tensor; no parameter is touched then.
    """
    start = time.perf_counter()
    files = open_weight_files(directory)
    stored = audit_hf(files, directory=directory, arch=arch, head=head)
    _clear_padding(layout, parameters=parameters)
    wanted: dict[Read, list[Placement]] = {}
    for placement in layout:
        if placement.tensor in stored:
            read = Read(stored[placement.tensor], placement.box)
            wanted.setdefault(read, []).append(placement)
    num_bytes = 0
    for read, value in files.read(wanted):
        num_bytes += value.numel() * value.element_size()
        on_read(value.numel() * value.element_size())
        for placement in wanted[read]:
            parameters[placement.parameter][placement.region(placement.box)].copy_(value)
    return LoadReport(
        bytes_read=num_bytes,
        num_tensors=len({read.name for read in wanted}),
        value_head_loaded=VALUE_HEAD in stored,
        seconds=time.perf_counter() - start,
    )


def audit_hf(
    files: WeightFiles, *, directory: str | Path, arch: ModelArchitecture, head: Head
) -> dict[str, str]:
    """Logical name -> name in the files, after an audit of all files, names and shapes.

    Raises UserError, listing every problem.
    """
    problems, stored = list(files.problems), {}
    if head != "value" and arch.head == "classification":
        problems.append("it is a sequence-classification model; a language model is needed here")
    if head == "value" and arch.head == "classification" and arch.num_labels != 1:
        problems.append(f"it has {arch.num_labels} labels; a value or reward model has one")
    for tensor in logical_tensors(arch, head=head):
        name = _find(tensor.name, among=files.shapes)
        if name is not None:
            stored[tensor.name] = name
            if files.shapes[name] != tensor.shape:
                problems.append(
                    f"{name}: shape {list(files.shapes[name])}, expected {list(tensor.shape)}"
                )
        elif _find(tensor.name, among=files.lost) is None and (
            tensor.name != VALUE_HEAD or arch.head == "classification"
        ):
            problems.append(f"{tensor.name}: missing")
    unused = set(files.shapes) - set(stored.values()) - _may_be_ignored(arch, head=head)
    problems += [
        f"{name}: not a tensor of a {arch.family} model of {arch.num_layers} layers"
        for name in sorted(unused)
        if not name.endswith("rotary_emb.inv_freq")  # computed; stored by old transformers
    ]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UserError(
            f"{directory}: the weights do not fit config.json: {count}\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    return stored


def _find(name: str, *, among: Collection[str]) -> str | None:
    """The name, or it without "model.": backbones saved on their own lack it."""
    return next((n for n in (name, name.removeprefix("model.")) if n in among), None)


def _may_be_ignored(arch: ModelArchitecture, *, head: Head) -> set[str]:
    """An output layer stored beside the embedding it is tied to, or that a critic has no use of."""
    unused = arch.tie_word_embeddings or head == "value"
    return set(vocab_tensors(arch)) if unused else set()


def _clear_padding(layout: Iterable[Placement], *, parameters: Mapping[str, Tensor]) -> None:
    covered: dict[str, int] = {}
    for placement in layout:
        covered[placement.parameter] = covered.get(placement.parameter, 0) + placement.box.numel
    for name, parameter in parameters.items():
        if covered.get(name, 0) < prod(parameter.shape):
            parameter.zero_()
