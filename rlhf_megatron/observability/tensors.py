"""The tensors of this process that take most memory, with names where there are any."""

import gc
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.observability.memory import GB

Names = Callable[[], Mapping[str, Tensor]]


def largest_tensors(device: torch.device, *, count: int = 10, names: Names = dict) -> list[str]:
    """One line each: size, type, shape and name of the largest storages on `device`, as the garbage
    collector finds them; what only autograd's graph or other libraries hold is not among them.

    names: what is known by name, "of what: which". A storage with several tensors in it is shown by
    the largest.
    """
    known: dict[int, list[str]] = {}
    for name, tensor in names().items():
        known.setdefault(_key(tensor), []).append(name)
    found: dict[int, Tensor] = {}
    for tensor in _tensors(device):
        key = _key(tensor)
        if key not in found or tensor.numel() > found[key].numel():
            found[key] = tensor
    largest = sorted(found.items(), key=lambda item: -item[1].untyped_storage().nbytes())[:count]
    return [
        f"{t.untyped_storage().nbytes() / GB:8.3f} GB  {str(t.dtype).removeprefix('torch.')} "
        f"{list(t.shape)}{_label(known.get(key, []))}"
        for key, t in largest
    ]


def _label(names: list[str]) -> str:
    if len(names) > 1:
        return f"  {names[0].partition(':')[0]} ({len(names)} tensors)"
    return f"  {names[0]}" if names else ""


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def live_objects() -> list[Any]:
    """What Python's collector knows of, with what the trainer has frozen for it."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    found = gc.get_objects()
    if was_frozen:
        gc.freeze()
    return found


def _tensors(device: torch.device) -> list[Tensor]:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some lazy modules warn where they are looked at
        for thing in live_objects():
            try:
                if isinstance(thing, Tensor) and thing.device.type == device.type and _key(thing):
                    found.append(thing)
            except Exception:
                continue
    return found
