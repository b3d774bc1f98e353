"""Out of memory: one message that says where, what lies there, and what would help."""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf_megatron.config import Config
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.engine.parts import named_parts
from rlhf_megatron.errors import JobError
from rlhf_megatron.models.build import RoleModel
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.observability.memory import memory_use
from rlhf_megatron.observability.tensors import largest_tensors, live_objects

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

Suggest = Callable[..., list[str]]
"""(config, *, phase, world_size) -> changes that would make the phase fit, best first."""
PlannedPeaks = Callable[..., Mapping[str, float]]
"""(config, *, world_size) -> phase -> planned peak in GB of the rank that needs most."""

SUGGESTIONS_SHOWN = 3
SNAPSHOT_ENTRIES = 100_000

_SIGNS = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "No available memory for the cache blocks",  # vLLM, as it starts
    "Free memory on device",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the device, or of the host as far as it says so (the kernel may kill the process)."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, JobError) or not isinstance(error, RuntimeError | ValueError):
        return False
    return any(sign in str(error) for sign in _SIGNS)


class OutOfMemoryReport:
    """Makes a JobError of an out-of-memory error; other errors it leaves alone."""

    def __init__(
        self,
        config: Config,
        *,
        context: DistributedContext,
        ledger: PhaseLedger,
        suggest: Suggest | None = None,
        planned_peaks: PlannedPeaks | None = None,
    ) -> None:
        self._config, self._context, self._ledger = config, context, ledger
        self._suggest, self._planned_peaks = suggest, planned_peaks
        if config.logging.memory_snapshot_on_oom and context.is_cuda:
            # The documented way to PyTorch's memory viewer, its underscore notwithstanding.
            torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)

    def raise_for(self, error: BaseException) -> None:
        """Raises JobError, from `error`, where that says that memory is out."""
        if not is_out_of_memory(error):
            return
        snapshot = self._write_snapshot()
        message = self._describe(error) + snapshot
        logger.error("%s", message, exc_info=error)
        raise JobError(message) from error

    def _describe(self, error: BaseException) -> str:
        device, rank = self._context.device, self._context.rank
        use = memory_use(device)
        where = self._ledger.describe_position()
        first_line = (str(error) or type(error).__name__).strip().splitlines()[0]
        lines = [
            f"out of memory on rank {rank}, {device}, in {where}: {first_line}",
            f"this rank: {use.allocated_gb:.2f} GB allocated, {use.reserved_gb:.2f} GB reserved "
            f"({100 * use.fragmentation:.0f} % of it not allocated), {_room(device)}",
            *self._phases(),
            "largest tensors that Python holds:",
            *(f"  {line}" for line in largest_tensors(device, names=named_tensors)),
            *self._suggestions(),
        ]
        return "\n".join(lines)

    def _phases(self) -> list[str]:
        """The ledger of the step so far, against the plan where there is one."""
        planned = _tried(self._planned_peaks, self._config, world_size=self._context.world_size)
        peaks: dict[str, float] = {}
        for record in self._ledger.records:
            peaks[record.phase] = max(peaks.get(record.phase, 0.0), record.peak_gb)
        if not peaks:
            return []
        lines = ["peak of each phase of this step so far, GB:"]
        for phase, peak in peaks.items():
            plan = f"   planned {planned[phase]:8.2f}" if planned and phase in planned else ""
            lines.append(f"  {phase:<14}{peak:8.2f}{plan}")
        return lines

    def _suggestions(self) -> list[str]:
        found = _tried(
            self._suggest,
            self._config,
            phase=self._ledger.current_phase or "",
            world_size=self._context.world_size,
        )
        if not found:
            return []
        return ["what would help, best first:", *(f"  - {s}" for s in found[:SUGGESTIONS_SHOWN])]

    def _write_snapshot(self) -> str:
        if not (self._config.logging.memory_snapshot_on_oom and self._context.is_cuda):
            return ""
        path = Path(self._config.run.output_dir) / f"oom_rank_{self._context.rank:04d}.pickle"
        try:
            torch.cuda.memory._dump_snapshot(str(path))
        except Exception as error:
            return f"\n(the memory snapshot could not be written: {error})"
        return f"\nmemory snapshot, for https://pytorch.org/memory_viz: {path}"


def named_tensors() -> dict[str, Tensor]:
    """Weights, gradients and optimizer state of all roles of this process, as far as built."""
    found: dict[str, Tensor] = {}
    trained: set[int] = set()
    for engine in _objects(ModelEngine):
        trained.add(id(engine.model))
        for kind, tensors in named_parts(engine.model, optimizer=engine.optimizer).items():
            if engine.memory.is_here(kind):
                role = engine.model.groups.role
                found |= {f"{role} {kind}: {name}": t for name, t in tensors().items()}
    for model in _objects(RoleModel):  # one that has no engine yet
        if id(model) not in trained:
            role = model.groups.role
            found |= {f"{role} weights: {name}": t for name, t in model.parameters().items()}
    return found


def _objects(kind: type[_T]) -> Iterable[_T]:
    return [thing for thing in live_objects() if type(thing) is kind]


def _room(device: torch.device) -> str:
    if device.type != "cuda":
        return "all of it the process's resident memory"
    free, total = torch.cuda.mem_get_info(device)
    return f"{free / 1e9:.2f} of {total / 1e9:.2f} GB free on the device"


def _tried(function: Callable[..., Any] | None, config: Config, **options: object) -> Any:
    """What the planner says; its own failure must not hide the error."""
    if function is None:
        return None
    try:
        return function(config, **options)
    except Exception as error:
        logger.warning("the planner failed: %r", error)
        return None
