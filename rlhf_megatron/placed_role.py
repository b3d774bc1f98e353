"""A role as every rank knows it, whether it holds a part of its model or not."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.engine.offload import WEIGHTS
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.megatron import megatron_layouts
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.tensors import Head
from rlhf_megatron.models.build import RoleModel


@dataclass(frozen=True, kw_only=True)
class PlacedRole:
    """Model and ranks of a role, and this rank's part of it."""

    name: str
    arch: ModelArchitecture
    head: Head
    layout: ParallelLayout
    dtype: torch.dtype
    """Of the parameters."""
    fused_norms: bool
    engine: ModelEngine | None
    """None on a rank without a part of it."""

    @property
    def model(self) -> RoleModel | None:
        return self.engine.model if self.engine is not None else None

    @cached_property
    def layouts(self) -> dict[int, RankLayout]:
        """Where its weights lie, on all its ranks; replicas share one layout object."""
        return megatron_layouts(
            self.arch, parallel=self.layout, head=self.head, fused_norms=self.fused_norms
        )

    def parameters(self) -> Mapping[str, Tensor]:
        """This rank's, by name."""
        return self.engine.model.parameters() if self.engine is not None else {}

    def weights_here(self) -> AbstractContextManager[None]:
        """Inside, this rank's part of the weights is on its device."""
        return self.engine.memory.on_device(WEIGHTS) if self.engine is not None else nullcontext()


def role_layouts(model: RoleModel) -> dict[int, RankLayout]:
    """Where a model's weights lie, on all the ranks of its role."""
    return megatron_layouts(
        model.arch, parallel=model.groups.layout, head=model.head, fused_norms=model.fused_norms
    )


def placed(engine: ModelEngine) -> PlacedRole:
    """The role of an engine, on a rank that has it."""
    model = engine.model
    return PlacedRole(
        name=model.groups.role,
        arch=model.arch,
        head=model.head,
        layout=model.groups.layout,
        dtype=model.config.params_dtype,
        fused_norms=model.fused_norms,
        engine=engine,
    )
