"""The actor's weights outside its phases: brought to the device, and exported. Collective."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_megatron.checkpoint.hf_write import export_hf
from rlhf_megatron.config import Config
from rlhf_megatron.engine.offload import WEIGHTS
from rlhf_megatron.engine_weights import EngineWeights
from rlhf_megatron.offloading import offloaded_kinds
from rlhf_megatron.placed_role import PlacedRole


class ActorWeights:
    """What the start check and exports need, on every rank of the job alike."""

    def __init__(
        self,
        actor: PlacedRole,
        *,
        config: Config,
        engine_weights: EngineWeights,
        is_split: bool,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """`is_split`: whether roles have ranks of their own. `group`: of the job."""
        self._actor, self._config = actor, config
        self._engine_weights, self._is_split = engine_weights, is_split
        self._group, self._device = group, device

    @contextmanager
    def on_device(self, *, version: int) -> Iterator[None]:
        """Inside, they are there, while the engine, which has weights `version`, may be awake."""
        if self._are_here():
            yield
            return
        with self._engine_weights.asleep(version=version), self._actor.weights_here():
            yield

    def export(self, target: Path, *, version: int) -> None:
        """A Hugging Face directory of them, in the place of one that is there; the engine's are
        `version`. Raises UserError on all ranks alike."""
        actor = self._actor
        with self.on_device(version=version):
            export_hf(
                target,
                arch=actor.arch,
                head="lm",
                layouts=actor.layouts,
                parameters=actor.parameters(),
                rank=dist.get_rank(),
                group=self._group,
                template_dir=self._config.actor.model,
                dtype=actor.dtype,
                overwrite=True,
                # On a rank without a part of the actor as well: all meet in the same collectives.
                device=self._device,
            )

    def _are_here(self) -> bool:
        """The same on all ranks."""
        if self._is_split:
            return WEIGHTS not in offloaded_kinds(self._config, role="actor")
        assert self._actor.engine is not None
        return self._actor.engine.memory.is_here(WEIGHTS)
