"""Memory of a role that leaves the device while it is not needed: to pinned host memory and back.

Tensors stay as they are, views of their storages; what changes is the size of the storages: 0 while
they are away. So parameters that lie in Megatron-Core's flat buffers, the optimizer's views of them
and whoever else holds views need no word of it (Megatron-Core's own offload of gradients, 0.16.1
param_and_grad_buffer.py:964 and 0.19.2, rests on the same). To read a tensor that is away is not
caught by torch and ends the process: `RoleMemory.assert_here` guards the entries.
"""

import mmap
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from rlhf_megatron.errors import UserError

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER)

_ALIGNMENT_BYTES = 512

NamedTensors = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Transfer:
    """A copy that is over."""

    direction: str
    """to_host or to_device."""
    num_bytes: int
    seconds: float
    phase: str
    """The one in which it was begun."""


class HostMemory:
    """Host memory by name: allocated and, beside a GPU, pinned once, then used again.

    By mmap and cudaHostRegister, which take what is asked for; torch's pinned allocator rounds each
    request up to a power of two, twice the memory at worst.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._places: dict[str, Tensor] = {}
        self.num_allocations = 0
        self.num_bytes = 0

    def places(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """A flat uint8 place for each name; those that are new lie in one allocation.

        Raises UserError where the host has not enough.
        """
        new = {
            name: size
            for name, size in sizes.items()
            if name not in self._places or self._places[name].numel() != size
        }
        if new:
            segment, begin = self._allocate(sum(map(_aligned, new.values()))), 0
            for name, size in new.items():
                self._places[name] = segment[begin : begin + size]
                begin += _aligned(size)
        return {name: self._places[name] for name in sizes}

    def _allocate(self, num_bytes: int) -> Tensor:
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            segment = torch.frombuffer(pages, dtype=torch.uint8)
            # A child would make pages copy-on-write, and the GPU write to the ones left behind.
            pages.madvise(mmap.MADV_DONTFORK)
            if self._pin:
                _register(segment)
                # Pages that are unmapped while they are registered spoil what is mapped there next.
                weakref.finalize(self, _unregister, segment).atexit = False
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"offload: the host gives no {num_bytes / 1e9:.1f} GB of "
                f"{'pinned ' if self._pin else ''}memory beside {self.num_bytes / 1e9:.1f} GB that "
                f"this rank has ({error}); offload less, or ask the scheduler for more memory"
            ) from error
        self.num_allocations += 1
        self.num_bytes += num_bytes
        return segment


def _register(segment: Tensor) -> None:
    """Raises RuntimeError where CUDA does not pin it."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(segment.data_ptr(), segment.numel(), 0))
    if code != 0:
        raise RuntimeError(f"cudaHostRegister: error {code}")


def _unregister(segment: Tensor) -> None:
    """Holds the pages until CUDA has let go of them."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(segment.data_ptr())  # type: ignore[no-untyped-call]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class Copier:
    """Copies storages to host memory and back; on a GPU on two streams of its own, one each way,
    beside the work."""

    def __init__(self, device: torch.device, *, current_phase: Callable[[], str]) -> None:
        self.device = device
        self._current_phase = current_phase
        self._out, self._in = (
            torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)
        )
        self._running: list[tuple[torch.cuda.Event, torch.cuda.Event, str, int, str]] = []
        self._finished: list[Transfer] = []

    def to_host(self, pairs: Iterable[tuple[UntypedStorage, Tensor]]) -> torch.cuda.Event | None:
        """Copy, then empty the storages. Their memory is free once the copies are over: the caching
        allocator waits for them before it gives it to others. Returns what marks their end."""
        pairs = list(pairs)
        num_bytes = sum(place.numel() for _, place in pairs)
        with self._timed("to_host", stream=self._out, num_bytes=num_bytes) as end:
            for storage, place in pairs:
                values = _bytes_of(storage, device=self.device)
                place.copy_(values, non_blocking=True)
                if self._out is not None:
                    values.record_stream(self._out)
        for storage, _ in pairs:
            storage.resize_(0)
        return end

    def to_device(
        self,
        pairs: Iterable[tuple[UntypedStorage, Tensor]],
        *,
        after: torch.cuda.Event | None = None,
    ) -> None:
        """Fill the empty storages, `after` what was to be copied first; `wait` before their use."""
        pairs = list(pairs)
        for storage, place in pairs:
            storage.resize_(place.numel())
        if self._in is not None and after is not None:
            self._in.wait_event(after)
        num_bytes = sum(place.numel() for _, place in pairs)
        with self._timed("to_device", stream=self._in, num_bytes=num_bytes):
            for storage, place in pairs:
                _bytes_of(storage, device=self.device).copy_(place, non_blocking=True)

    def wait(self) -> None:
        """The current stream goes on when all that is on its way here has come; the host does not
        wait."""
        if self._in is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._in)

    def synchronize(self) -> None:
        """The host waits: what was copied to it may be read."""
        if self._out is not None:
            self._out.synchronize()

    def take_finished(self) -> list[Transfer]:
        """The transfers that have ended since the last call."""
        still_running = []
        for transfer in self._running:
            begin, end, direction, num_bytes, phase = transfer
            if end.query():
                seconds = begin.elapsed_time(end) / 1e3
                self._finished.append(Transfer(direction, num_bytes, seconds, phase))
            else:
                still_running.append(transfer)
        self._running = still_running
        finished, self._finished = self._finished, []
        return finished

    @contextmanager
    def _timed(
        self, direction: str, *, stream: torch.cuda.Stream | None, num_bytes: int
    ) -> Iterator[torch.cuda.Event | None]:
        phase = self._current_phase()
        if stream is None:
            started = time.perf_counter()
            yield None
            seconds = time.perf_counter() - started
            self._finished.append(Transfer(direction, num_bytes, seconds, phase))
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # After the work that fills the storages, and after who had their new memory before.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            begin.record()
            yield end
            end.record()
        self._running.append((begin, end, direction, num_bytes, phase))


def _bytes_of(storage: UntypedStorage, *, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def storage_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Of the tensors' storages, each counted once; of one that is away 0."""
    return sum(storage.nbytes() for storage in {t.untyped_storage() for t in tensors.values()})


class OffloadedPart:
    """One kind of a role's memory: on the device or, all of it, away."""

    def __init__(
        self,
        name: str,
        *,
        tensors: NamedTensors,
        copier: Copier,
        host: HostMemory,
        keeps_values: bool = True,
        moves: bool = True,
    ) -> None:
        """`tensors`, asked when the part is on the device: what it consists of, by names that stay.
        keeps_values: False for gradients, which come back as zeros. moves: False only counts."""
        self.name = name
        self._tensors, self._copier, self._host = tensors, copier, host
        self._keeps_values, self._moves = keeps_values, moves
        self._away: dict[UntypedStorage, tuple[int, Tensor | None]] = {}
        self._host_is_current = False
        self._copied: torch.cuda.Event | None = None
        self.is_here = True
        self.num_releases = 0
        self.size_bytes = 0
        """As of the last release."""

    @property
    def away_bytes(self) -> int:
        return sum(size for size, _ in self._away.values())

    def will_change(self) -> None:
        """Its values are about to be written: the copy on the host is good no longer."""
        assert self.is_here, self.name
        self._host_is_current = False

    def release(self) -> None:
        """Off the device; without a copy where the one that it came from is still good."""
        if not self.is_here:
            return
        self._copier.wait()
        storages = self._storages()
        sizes = {name: storage.nbytes() for name, storage in storages.items()}
        self.is_here = False
        self.num_releases += 1
        self.size_bytes = sum(sizes.values())
        if not self._moves:
            self._away = {storages[name]: (size, None) for name, size in sizes.items()}
            return
        if not self._keeps_values:
            self._away = {storages[name]: (size, None) for name, size in sizes.items()}
            for storage in storages.values():
                storage.resize_(0)
            return
        places = self._host.places({f"{self.name}.{name}": n for name, n in sizes.items()})
        pairs = {name: (storages[name], places[f"{self.name}.{name}"]) for name in storages}
        self._away = {storage: (place.numel(), place) for storage, place in pairs.values()}
        if not self._host_is_current:
            self._copied = self._copier.to_host(pairs.values())
            self._host_is_current = True
        else:
            for storage in storages.values():
                storage.resize_(0)

    def fetch(self) -> None:
        """Begin to bring it back; `wait` before it is used."""
        if self.is_here:
            return
        away, self._away, self.is_here = self._away, {}, True
        if not self._moves:
            return
        if self._keeps_values:
            pairs = [(s, place) for s, (_, place) in away.items() if place is not None]
            self._copier.to_device(pairs, after=self._copied)
            return
        for storage, (size, _) in away.items():
            storage.resize_(size)
            _bytes_of(storage, device=self._copier.device).zero_()

    def wait(self) -> None:
        assert self.is_here, self.name
        self._copier.wait()

    def host_view(self, tensor: Tensor) -> Tensor | None:
        """The values on the host of a tensor that is away; None of one that is not of this part."""
        _, place = self._away.get(tensor.untyped_storage(), (0, None))
        if place is None:
            return None
        self._copier.synchronize()
        offset = place.storage_offset() // tensor.element_size() + tensor.storage_offset()
        return torch.empty(0, dtype=tensor.dtype).set_(
            place.untyped_storage(), offset, tensor.shape, tensor.stride()
        )

    def _storages(self) -> dict[str, UntypedStorage]:
        """Each once, by the name of the first tensor that lies in it."""
        found: dict[UntypedStorage, str] = {}
        for name, tensor in self._tensors().items():
            storage = tensor.untyped_storage()
            if storage.nbytes() > 0:
                found.setdefault(storage, name)
        return {name: storage for storage, name in found.items()}


class RoleMemory:
    """What of a role's memory is offloaded, by kind. Without parts nothing ever moves."""

    def __init__(self) -> None:
        self.parts: dict[str, OffloadedPart] = {}

    def is_here(self, *kinds: str) -> bool:
        return all(part.is_here for kind, part in self.parts.items() if kind in kinds)

    def assert_here(self, *kinds: str) -> None:
        away = [kind for kind in kinds if not self.is_here(kind)]
        assert not away, f"{away} are on the host"

    def fetch(self, *kinds: str) -> None:
        """Begin to bring back."""
        for kind in kinds:
            if kind in self.parts:
                self.parts[kind].fetch()

    def wait(self, *kinds: str) -> None:
        for kind in kinds:
            if kind in self.parts:
                self.parts[kind].wait()

    def will_change(self, *kinds: str) -> None:
        """Call before they are written: `release` copies only what was."""
        for kind in kinds:
            if kind in self.parts:
                self.parts[kind].will_change()

    def release(self, *kinds: str) -> None:
        for kind in kinds:
            if kind in self.parts:
                self.parts[kind].release()

    @contextmanager
    def on_device(self, *kinds: str, writes: bool = False) -> Iterator[None]:
        """Inside, the kinds are on the device; afterwards those that were away are so again."""
        brought = [kind for kind in kinds if not self.is_here(kind)]
        self.fetch(*brought)
        self.wait(*kinds)
        if writes:
            self.will_change(*kinds)
        yield
        self.release(*brought)

    def readable(self, tensor: Tensor) -> Tensor:
        """The tensor itself or, where it is away, its values on the host."""
        for part in self.parts.values():
            found = part.host_view(tensor)
            if found is not None:
                return found
        return tensor
