"""One role on one rank: what it keeps, and what its passes need."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.tensors import Head
from rlhf_megatron.memory.activations import Kernels
from rlhf_megatron.memory.lora import adapter_elements
from rlhf_megatron.memory.parameters import (
    FP32_BYTES,
    NUM_MOMENTS,
    TrainingElements,
    largest,
    megatron_chunks,
    numel,
    optimizer_bytes_per_element,
    training_elements,
)
from rlhf_megatron.memory.phases import Part
from rlhf_megatron.memory.rollout import itemsize_of
from rlhf_megatron.memory.switches import OffloadChoice, RecomputeChoice
from rlhf_megatron.memory.training import BatchSizes, PassMemory, StageModel, training_pass


@dataclass(frozen=True, kw_only=True)
class RoleSetting:
    """A role as the configuration has it."""

    name: str
    arch: ModelArchitecture
    layout: ParallelLayout
    head: Head
    precision: str
    is_trained: bool
    recompute: RecomputeChoice
    offload: OffloadChoice
    lora_rank: int = 0
    """Above 0: the weights are frozen, and adapters of this rank are trained (planned only)."""


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """Bytes of a role's lasting state on one rank."""

    setting: RoleSetting
    model: StageModel
    resident: Mapping[Part, int]
    optimizer_workspace: int
    """Of AdamW's step: on a CPU torch's multi-tensor one makes a float32 array over the rank's
    whole shard; the fused ones on a GPU make none."""
    checkpoint_workspace: int
    """To gather a parameter's optimizer state from its replicas."""
    checkpoint_host: int
    """Copies in host memory from which checkpoints are written."""


def role_memory(setting: RoleSetting, *, rank: int, kernels: Kernels, on_gpu: bool) -> RoleMemory:
    """Of a rank that the role has."""
    at = setting.layout.coordinates(rank)
    itemsize = itemsize_of(setting.precision)
    chunks = megatron_chunks(setting.arch, layout=setting.layout, stage=at.pp, head=setting.head)
    elements = sum(map(numel, chunks))
    replicas = setting.layout.data_parallel_size
    per_element = optimizer_bytes_per_element(setting.precision)
    trained = TrainingElements(buffer=0, shard=0, largest_bucket=0)
    weights = elements * itemsize
    state = 0
    if setting.lora_rank:
        adapters = adapter_elements(chunks, rank=setting.lora_rank)
        trained = TrainingElements(
            buffer=adapters, shard=-(-adapters // replicas), largest_bucket=adapters
        )
        weights += adapters * itemsize
        state = adapters
    elif setting.is_trained:
        trained = training_elements(chunks, data_parallel_size=replicas, replica=at.dp)
        weights = trained.buffer * itemsize
        state = elements
    stored = itemsize + FP32_BYTES * (NUM_MOMENTS + (itemsize < FP32_BYTES))
    return RoleMemory(
        setting=setting,
        model=StageModel(
            arch=setting.arch,
            layout=setting.layout,
            stage=at.pp,
            head=setting.head,
            itemsize=itemsize,
            kernels=kernels,
            recompute=setting.recompute,
        ),
        resident={
            "weights": weights,
            "gradients": trained.buffer * FP32_BYTES,
            "optimizer": trained.shard * per_element,
        },
        optimizer_workspace=0 if on_gpu else trained.shard * FP32_BYTES,
        checkpoint_workspace=(
            max(map(largest, chunks)) * FP32_BYTES if replicas > 1 and state else 0
        ),
        checkpoint_host=-(-state // replicas) * stored,
    )


def update_pass(role: RoleMemory, *, sizes: BatchSizes) -> PassMemory:
    """What an update needs at most beside the role's lasting state: in its passes, or after them in
    the optimizer's step."""
    found = training_pass(role.model, sizes=sizes)
    if role.optimizer_workspace <= found.total - found.batch:
        return found
    return PassMemory(
        activations=0,
        recomputed=0,
        logits=0,
        workspace=role.optimizer_workspace,
        batch=found.batch,
        instant="optimizer step",
    )
