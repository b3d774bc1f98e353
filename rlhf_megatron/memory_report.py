"""The memory plan of a configuration: reads its models, plans, and says what would help."""

from pathlib import Path

from rlhf_megatron.architectures import Architectures
from rlhf_megatron.config import Config
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.memory.plan import Machine, RoleModels

GPU_MEMORY_GB = 80.0
"""Of the GPU that is planned for where nothing is said."""


def role_models(config: Config, *, architectures: Architectures) -> RoleModels:
    """The roles' models, the reward's included where there is one and its directory is here."""
    directory = config.reward.model
    reward = None
    if directory and (Path(directory) / "config.json").is_file():
        reward = read_architecture(directory)
    return RoleModels(
        actor=architectures.actor,
        critic=architectures.critic,
        ref=architectures.ref,
        reward=reward,
    )


def machine_of(
    config: Config,
    *,
    world_size: int,
    gpu_memory_gb: float = GPU_MEMORY_GB,
    gpus_per_node: int = 8,
    host_memory_gb: float = 0.0,
    device: str = "auto",
) -> Machine:
    """`device` "auto": distributed.device, which is a GPU unless it says cpu."""
    device = config.distributed.device if device == "auto" else device
    return Machine(
        world_size=world_size,
        gpu_memory_bytes=None if device == "cpu" else int(gpu_memory_gb * 1e9),
        gpus_per_node=gpus_per_node,
        host_memory_bytes=int(host_memory_gb * 1e9) if host_memory_gb else None,
    )
