"""Host memory of a rank and of a node: what is offloaded, asleep, or copied for a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_megatron.config import Config
from rlhf_megatron.memory.roles import RoleMemory
from rlhf_megatron.memory.rollout import EngineMemory

PROCESS_BYTES = 4_000_000_000
"""Of a process with torch and vLLM imported, prompts and batches included; an estimate."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of one rank's process outside of the GPU, by what they are for."""

    by_kind: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def host_memory(
    config: Config,
    *,
    roles: Sequence[RoleMemory],
    engine: EngineMemory | None,
    is_gpu: bool,
) -> HostMemory:
    """On a CPU, where nothing is moved, only the process and the checkpoint's copies."""
    found = {"process": PROCESS_BYTES}
    for role in roles:
        name, offload = role.setting.name, role.setting.offload
        if is_gpu:
            # Gradients are given up, not copied: each update begins at zero.
            found[f"offload {name}"] = role.resident["weights"] * offload.weights
            found[f"offload {name}"] += role.resident["optimizer"] * offload.optimizer
        found[f"checkpoint copies {name}"] = role.checkpoint_host
    if engine is not None and is_gpu and config.rollout.sleep_level == 1:
        found["sleeping engine"] = engine.weights
    return HostMemory(by_kind={kind: size for kind, size in found.items() if size})
