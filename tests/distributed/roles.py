"""Roles on the ranks of a test: from a model directory and a layout to a ModelEngine."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_megatron.checkpoint.hf_read import load_hf_checkpoint
from rlhf_megatron.distributed.groups import GroupFactory, build_role_groups
from rlhf_megatron.engine.microbatch import MicroBatch, make_micro_batch
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.layout.parallel import DIMENSIONS, ParallelLayout
from rlhf_megatron.models.build import LM_HEAD, build_model
from rlhf_megatron.models.config import OptimizerConfig

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A parallel layout over the ranks of the job, all of them or those from `first` on."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sp: bool = False
    vpp: int = 1
    first: int = 0
    order: tuple[str, ...] = DIMENSIONS

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            tuple(range(self.first, self.first + self.world_size)),
            self.tp,
            self.pp,
            self.dp,
            order=self.order,
            sequence_parallel=self.sp,
            virtual_pipeline_model_parallel_size=self.vpp,
        )

    def __str__(self) -> str:
        virtual = f"vpp{self.vpp}" if self.vpp > 1 else ""
        name = f"tp{self.tp}pp{self.pp}{virtual}dp{self.dp}{'sp' if self.sp else ''}"
        return name if self.order == DIMENSIONS else f"{name}-{'-'.join(self.order)}"


def new_factory() -> GroupFactory:
    return GroupFactory(timeout_seconds=60)


def build_role(
    directory: Path,
    *,
    shape: Shape,
    factory: GroupFactory,
    head: str = LM_HEAD,
    optimizer: OptimizerConfig | None = None,
    precision: str = "fp32",
    dtype: torch.dtype | None = None,
    seed: int = 1,
    load: bool = True,
) -> ModelEngine:
    """A role with the weights of `directory`; random ones with load=False."""
    groups = build_role_groups(f"{head}-{shape}", layout=shape.layout, factory=factory)
    assert groups is not None
    model = build_model(
        read_architecture(directory),
        head=head,
        groups=groups,
        precision=precision,
        layer_spec_name="local",
        device=CPU,
        seed=seed,
        dtype=dtype,
    )
    engine = ModelEngine(model, device=CPU, optimizer_config=optimizer)
    if load:
        load_hf_checkpoint(
            directory,
            layout=model.rank_layout(dist.get_rank()),
            parameters=model.parameters(),
            arch=model.arch,
            head=head,
        )
        engine.weights_changed()
    return engine


def micro_batches(engine: ModelEngine, batch, *, samples_by_replica, fields=()) -> list[MicroBatch]:
    """This rank's micro-batches: [replica][micro-batch] -> samples."""
    return [
        make_micro_batch(
            batch,
            samples=samples,
            fields=fields,
            pad_to_multiple=engine.pad_to_multiple,
            device=CPU,
        )
        for samples in samples_by_replica[engine.model.groups.coordinates.dp]
    ]
