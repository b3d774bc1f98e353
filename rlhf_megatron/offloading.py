"""Which memory of which role is on the device in which phase; engine/offload.py moves it."""

import logging
import os

import torch

from rlhf_megatron.config import Config
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.engine.offload import GRADIENTS, KINDS, OPTIMIZER, WEIGHTS, Copier
from rlhf_megatron.faults_config import PHASES
from rlhf_megatron.observability.ledger import PhaseLedger, PhaseRecord
from rlhf_megatron.observability.memory import GB, memory_use

logger = logging.getLogger(__name__)

NEEDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "log_prob": ("actor", (WEIGHTS,)),
    "ref_log_prob": ("ref", (WEIGHTS,)),
    "value": ("critic", (WEIGHTS,)),
    "update_critic": ("critic", KINDS),
    "update_actor": ("actor", KINDS),
    "reshard": ("actor", (WEIGHTS,)),
}
"""Phase -> role and kinds. All others need nothing on the device: a checkpoint reads the host's
copies (ModelEngine.memory.readable)."""

ORDER = PHASES[PHASES.index("rollout") : PHASES.index("reshard") + 1]
"""Of a step's phases."""

ORDERS = {
    0: ORDER,
    1: (
        *("rollout", "sleep", "update_critic", "update_actor"),
        *("log_prob", "ref_log_prob", "value", "reshard", "reward", "advantage"),
    ),
}
"""pipeline.depth -> a step's phases in order, as far as the phase that follows is known."""

PASSED_THROUGH = ("exchange", "evaluation_exchange")
"""Phases in which everything stays where it is: ranks only wait in them."""

ROOM_USED = 0.9
"""Share of the free memory that counts as room to fetch ahead: the rest may lie in pieces."""


def offloaded_kinds(config: Config, *, role: str) -> tuple[str, ...]:
    """What of a role is on the host outside its own phases."""
    if role == "ref":
        return (WEIGHTS,) if config.ref.offload else ()
    options = config.actor if role == "actor" else config.critic
    wanted = {
        WEIGHTS: options.offload_weights,
        GRADIENTS: options.offload_gradients,
        OPTIMIZER: options.offload_optimizer,
    }
    return tuple(kind for kind in KINDS if wanted[kind])


class Offloader:
    """A PhaseListener that brings what a phase needs and takes away what the next one does not.

    Beside the work: what is taken away is copied while the next phase runs, and what the next phase
    needs is fetched while this one runs, where its last passage has left room for that. Each rank
    decides for itself; results do not depend on it.
    """

    def __init__(
        self,
        config: Config,
        *,
        device: torch.device,
        ledger: PhaseLedger,
        moves: bool | None = None,
    ) -> None:
        """moves: False only counts; by default so on a CPU, whose memory is the host's."""
        self._config, self._device, self._ledger = config, device, ledger
        self._moves = device.type == "cuda" if moves is None else moves
        self._copier = Copier(
            device, current_phase=lambda: ledger.current_phase or ledger.last_phase or ""
        )
        self._roles: dict[str, ModelEngine] = {}
        self._growth_gb: dict[str, float] = {}
        """Phase -> how far its last passage went beyond what it began with and was brought."""
        self._brought_gb = 0.0
        self._debug = os.environ.get("RLHF_MEGATRON_DEBUG") == "1"

    @property
    def is_used(self) -> bool:
        return any(engine.memory.parts for engine in self._roles.values())

    def add(self, role: str, engine: ModelEngine) -> None:
        """A role that is complete: from here on it is on the device in its phases alone."""
        kinds = offloaded_kinds(self._config, role=role)
        engine.make_offloadable(kinds, copier=self._copier, moves=self._moves)
        self._roles[role] = engine
        engine.memory.release(*kinds)

    def phase_entered(self, *, step: int, phase: str) -> None:
        if phase in PASSED_THROUGH:
            return
        following = self._following(phase)
        self._release_all_but(phase, following)
        self._brought_gb = self._fetch(phase)
        for engine, kinds in self._needed(phase):
            engine.memory.wait(*kinds)
        if self._has_room_for(following, during=phase):
            self._brought_gb += self._fetch(following)

    def phase_exited(self, record: PhaseRecord) -> None:
        if record.phase in PASSED_THROUGH:
            return
        growth = record.peak_gb - record.entry_gb - self._brought_gb
        self._growth_gb[record.phase] = max(growth, 0.0)
        self._release_all_but(self._following(record.phase))
        self._record_transfers()

    def release(self) -> None:
        """Everything, within a phase: the engines have the actor's weights."""
        self._release_all_but()

    def __str__(self) -> str:
        lines = []
        for role, engine in self._roles.items():
            for kind, part in engine.memory.parts.items():
                lines.append(f"{role}.{kind} {part.size_bytes / GB:.3f} GB")
        counted = "" if self._moves else " (counted only: a CPU's memory is the host's)"
        return f"offload, on this rank: {', '.join(lines)}{counted}"

    def _needed(self, phase: str) -> list[tuple[ModelEngine, tuple[str, ...]]]:
        role, kinds = NEEDS.get(phase, ("", ()))
        return [(self._roles[role], kinds)] if role in self._roles else []

    def _away_bytes(self, phase: str) -> int:
        """Of what the phase needs."""
        return sum(
            engine.memory.parts[kind].away_bytes
            for engine, kinds in self._needed(phase)
            for kind in kinds
            if kind in engine.memory.parts
        )

    def _fetch(self, phase: str) -> float:
        """Begin to bring what the phase needs; how much that is, in GB."""
        num_bytes = self._away_bytes(phase)
        for engine, kinds in self._needed(phase):
            engine.memory.fetch(*kinds)
        return num_bytes / GB

    def _following(self, phase: str) -> str:
        """The phase after this one in a step; "" where that is not known."""
        order = [
            p
            for p in ORDERS[self._config.pipeline.depth]
            if p not in NEEDS or NEEDS[p][0] in self._roles
        ]
        if phase not in order:
            return ""
        return order[(order.index(phase) + 1) % len(order)]

    def _release_all_but(self, *phases: str) -> None:
        kept = {
            (id(engine), kind)
            for phase in phases
            for engine, kinds in self._needed(phase)
            for kind in kinds
        }
        for engine in self._roles.values():
            gone = [kind for kind in engine.memory.parts if (id(engine), kind) not in kept]
            engine.memory.release(*gone)

    def _has_room_for(self, following: str, *, during: str) -> bool:
        """Whether what the next phase needs fits beside this one. Not in a phase's first passage:
        nothing is known of it."""
        if during not in self._growth_gb:
            return False
        if self._device.type != "cuda":
            return True
        use = memory_use(self._device)
        free, _ = torch.cuda.mem_get_info(self._device)
        room = ROOM_USED * (free / GB + use.reserved_gb - use.active_gb)
        return self._away_bytes(following) / GB + self._growth_gb[during] <= room

    def _record_transfers(self) -> None:
        for transfer in self._copier.take_finished():
            self._ledger.communication.record(
                "offload",
                collective=transfer.direction,
                num_bytes=transfer.num_bytes,
                seconds=transfer.seconds,
                phase=transfer.phase,
            )
            if self._debug:
                logger.info("offload, begun in %s: %s", transfer.phase, transfer)
