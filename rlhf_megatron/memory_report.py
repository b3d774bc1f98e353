"""The memory plan of a configuration: its models, the plan, and what would help."""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.architectures import Architectures, read_architectures
from rlhf_megatron.config import Config
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.memory.plan import Machine, MemoryPlan, RoleModels, plan_memory
from rlhf_megatron.memory.report import describe_plan
from rlhf_megatron.memory.suggestions import Advice, helpful_in, suggest

logger = logging.getLogger(__name__)

PLAN_FILE = "memory_plan.json"
"""In the run's folder."""
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


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A plan, and what would make it fit where it does not."""

    plan: MemoryPlan
    advice: Advice

    def __str__(self) -> str:
        return describe_plan(self.plan, advice=self.advice)


def planned(
    config: Config, *, models: RoleModels, machine: Machine, lora_rank: int = 0
) -> PlannedRun:
    """Plan a valid configuration and look for changes where it does not fit."""
    plan = plan_memory(config, models=models, machine=machine, lora_rank=lora_rank)
    return PlannedRun(plan=plan, advice=suggest(config, models=models, machine=machine, plan=plan))


def planned_peaks(config: Config, *, world_size: int) -> dict[str, float]:
    """Phase -> planned peak in GB as torch's allocator counts, of the ranks that need most, on the
    GPUs of this process; for the message of a run that is out of memory."""
    models = role_models(config, architectures=read_architectures(config))
    plan = plan_memory(config, models=models, machine=this_machine(world_size))
    peaks: dict[str, float] = {}
    for rank in plan.ranks:
        for phase in rank.phases:
            peaks[phase.phase] = max(peaks.get(phase.phase, 0.0), phase.allocated / 1e9)
    return peaks


def write_planned_peaks(config: Config, *, world_size: int) -> None:
    """Write the plan beside the run's ledger, for its report; on rank 0 only. On a CPU nothing is
    written: the ledger measures whole processes there. A plan that fails is a warning."""
    if config.distributed.device == "cpu" or not on_gpu():
        return
    try:
        peaks = planned_peaks(config, world_size=world_size)
    except Exception as error:
        logger.warning("no memory plan for the report: %r", error, exc_info=True)
        return
    phases = {phase: {"peak_gb": gb} for phase, gb in peaks.items()}
    path = Path(config.run.output_dir) / PLAN_FILE
    path.write_text(json.dumps({"phases": phases}, indent=1), encoding="utf-8")


def on_gpu() -> bool:
    """Whether this process sees a GPU."""
    import torch

    return torch.cuda.is_available()


def suggested(config: Config, *, phase: str, world_size: int) -> list[str]:
    """Changes that lower the planned peak of `phase`, best first, each in one line; for the message
    of a run that is out of memory, whether its plan fits or not."""
    models = role_models(config, architectures=read_architectures(config))
    found = helpful_in(config, phase=phase, models=models, machine=this_machine(world_size))
    return [f"{' '.join(s.overrides)}: {s.gain_bytes / 1e9:.1f} GB less; {s.cost}" for s in found]


def this_machine(world_size: int) -> Machine:
    """Where this process runs."""
    import torch

    size = torch.cuda.mem_get_info()[1] if on_gpu() else None
    return Machine(
        world_size=world_size,
        gpu_memory_bytes=size,
        gpus_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", min(world_size, 8))),
    )
