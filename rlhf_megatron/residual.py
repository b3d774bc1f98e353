"""What stays on a GPU when the engine sleeps and the roles are offloaded: it must not grow."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from rlhf_megatron.data.exchange import gather_lists
from rlhf_megatron.distributed.start import release_cached_memory
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.engine.offload import storage_bytes
from rlhf_megatron.engine.parts import named_parts
from rlhf_megatron.errors import JobError
from rlhf_megatron.observability.ledger import PhaseRecord
from rlhf_megatron.observability.memory import GB, memory_use
from rlhf_megatron.observability.tensors import largest_tensors

GROWTH_GB = 2.0
"""Without a bound: how far the residual may grow beyond its first measurement."""


class ResidualCheck:
    """A PhaseListener: at the end of `sleep`, on GPUs, the memory in use beside the roles' known
    bytes must be under a bound. That is contexts, communicators, what the sleeping engine keeps,
    and tensors that nobody should hold. Raises JobError on all ranks where it is not on any.
    """

    def __init__(
        self,
        *,
        bound_gb: float,
        device: torch.device,
        group: dist.ProcessGroup,
        roles: Sequence[ModelEngine],
        measure: Callable[[torch.device], float] | None = None,
    ) -> None:
        """bound_gb: rollout.sleep_residual_gb; 0: GROWTH_GB above the first measurement, in the
        second step of this process. roles: what they hold on the device is known. measure: GB in
        use, for tests."""
        self._bound_gb, self._device, self._group = bound_gb, device, group
        self._roles = list(roles)
        self._measure = measure or _used_gb
        self._is_checked = device.type == "cuda" or measure is not None
        self._first_step: int | None = None

    def phase_entered(self, *, step: int, phase: str) -> None:
        """Nothing."""

    def phase_exited(self, record: PhaseRecord) -> None:
        if record.phase != "sleep" or not self._is_checked:
            return
        if self._bound_gb == 0 and not self._has_settled(record.step):
            return
        roles = resident_bytes(self._roles)
        residual = self._measure(self._device) - sum(roles.values()) / GB
        if self._bound_gb == 0:
            self._bound_gb = residual + GROWTH_GB
        beyond = torch.tensor([residual > self._bound_gb], dtype=torch.int32, device=self._device)
        dist.all_reduce(beyond, op=dist.ReduceOp.MAX, group=self._group)
        if int(beyond):
            own = [self._describe(residual, roles=roles)] if residual > self._bound_gb else []
            found = gather_lists(own, group=self._group)
            raise JobError(
                f"sleep of step {record.step}: more is left on the device than may be. {found[0]}"
                + (f"\n(and on {len(found) - 1} more ranks)" if len(found) > 1 else "")
                + "\nRaise rollout.sleep_residual_gb where that is meant; else something holds "
                "memory that it should have given back"
            )

    def _has_settled(self, step: int) -> bool:
        """Whether a whole step lies behind: communicators and workspaces come with their use."""
        if self._first_step is None and step > 0:
            self._first_step = step
        return self._first_step is not None and step > self._first_step

    def _describe(self, residual: float, *, roles: Mapping[str, int]) -> str:
        use = memory_use(self._device)
        held = ", ".join(f"{name} {size / GB:.2f} GB" for name, size in roles.items() if size)
        lines = [
            f"Rank {dist.get_rank()}: {residual:.2f} GB beside the roles (bound "
            f"{self._bound_gb:.2f} GB, rollout.sleep_residual_gb).",
            f"Roles on the device: {held or 'none'}. PyTorch: {use.allocated_gb:.2f} GB allocated, "
            f"{use.reserved_gb:.2f} GB reserved. Largest tensors:",
            *(f"  {line}" for line in largest_tensors(self._device, count=5)),
        ]
        return "\n".join(lines)


def resident_bytes(roles: Sequence[ModelEngine]) -> dict[str, int]:
    """What the roles hold on the device: "actor weights" -> bytes."""
    return {
        f"{engine.model.groups.role} {kind}": storage_bytes(tensors())
        for engine in roles
        for kind, tensors in named_parts(engine.model, optimizer=engine.optimizer).items()
    }


def _used_gb(device: torch.device) -> float:
    release_cached_memory(device)
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / GB
