"""Bytes of tensors, counted on a CPU: what autograd saves, and what is alive at most."""

import time
from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SETTLE_SECONDS = 0.05


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class SavedTensors:
    """Bytes that autograd saves, each storage once, but for those of `parameters`.

    `live` is what is saved at present; `peak_before_backward` the most until autograd first takes
    something back.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._own = {p.untyped_storage().data_ptr() for p in parameters}
        self._count: dict[int, int] = {}
        self._bytes: dict[int, int] = {}
        self.live = self.peak_before_backward = 0
        self._is_forward = True

    @contextmanager
    def counting(self) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield self

    def _pack(self, tensor: Tensor) -> "_Held":
        return _Held(tensor, self)

    def _unpack(self, held: "_Held") -> Tensor:
        self._is_forward = False
        return held.tensor

    def add(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._own:
            if not self._count.get(key):
                self._bytes[key] = storage.nbytes()
                self.live += storage.nbytes()
                if self._is_forward:
                    self.peak_before_backward = max(self.peak_before_backward, self.live)
            self._count[key] = self._count.get(key, 0) + 1
        return key

    def remove(self, key: int) -> None:
        if key not in self._own:
            self._count[key] -= 1
            if not self._count[key]:
                self.live -= self._bytes[key]


class _Held:
    """A saved tensor; counted until autograd lets go of it."""

    def __init__(self, tensor: Tensor, counter: SavedTensors) -> None:
        self.tensor, self._counter = tensor, counter
        self._key = counter.add(tensor)

    def __del__(self) -> None:
        self._counter.remove(self._key)


class LiveTensors(TorchDispatchMode):
    """The most bytes at once of storages that are made inside the block.

    Gloo's threads let go of a collective's tensors some time after its `wait` returns. So while a
    tensor of a collective is alive, a new peak is believed only where it lasts for SETTLE_SECONDS.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._in_collectives: set[int] = set()
        self.peak = self.live = 0
        self.at_peak = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor) and _key(t) not in known]
        if func.namespace == "c10d":
            self._in_collectives |= known
        if made:
            for tensor in made:
                storage = tensor.untyped_storage()
                self._alive[_key(tensor)] = (StorageWeakRef(storage), storage.nbytes())
            self._count()
            if self.live > self.peak:
                self._settle()
            if self.live > self.peak:
                self.peak, self.at_peak = self.live, str(func)
        return result

    def _count(self) -> None:
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        self._in_collectives &= self._alive.keys()
        self.live = sum(size for _, size in self._alive.values())

    def _settle(self) -> None:
        end = time.monotonic() + SETTLE_SECONDS
        while self._in_collectives and self.live > self.peak and time.monotonic() < end:
            time.sleep(0.001)
            self._count()
        if self.live > self.peak:
            self._in_collectives.clear()  # what is still there is held by the program itself


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
