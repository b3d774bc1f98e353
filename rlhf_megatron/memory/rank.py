"""What one rank has on its device in each phase."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlhf_megatron.config import Config
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.sizes import num_parameters
from rlhf_megatron.memory.activations import FP32_BYTES
from rlhf_megatron.memory.host import HostMemory, host_memory
from rlhf_megatron.memory.phases import CHECKPOINT, PHASES, RESHARD, SETUP, Awake, Phase
from rlhf_megatron.memory.roles import RoleMemory, update_pass
from rlhf_megatron.memory.rollout import EngineMemory, longest_tokens
from rlhf_megatron.memory.training import BatchSizes, PassMemory, inference_pass

SLACK_SHARE = 0.1
"""Of the tensors that come and go: what the caching allocator holds beside them; an estimate."""
CONTEXT_BYTES = 700_000_000
"""CUDA context, kernels and cuBLAS workspaces of a process; an estimate."""
COMMUNICATOR_BYTES = 150_000_000
"""Of NCCL's buffers for each process group of several ranks; an estimate."""
NOT_OF_TORCH = frozenset({"slack", "context", "cuda_graphs"})
"""Kinds that torch's allocator does not count as allocated."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """Bytes on a device, by whom and for what."""

    owner: str
    """A role, "engine", or "job"."""
    kind: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The most that a phase has on a device at once."""

    phase: str
    items: tuple[Item, ...]
    instant: str = ""
    """What runs when its pass needs most; empty where nothing passes through a model."""

    @property
    def total(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def allocated(self) -> int:
        """As torch's allocator counts (the ledger's peak_gb)."""
        return sum(item.num_bytes for item in self.items if item.kind not in NOT_OF_TORCH)

    def of(self, *, owner: str = "", kind: str = "") -> int:
        """Bytes of the items of an owner, of a kind, or of both."""
        return sum(
            item.num_bytes
            for item in self.items
            if owner in ("", item.owner) and kind in ("", item.kind)
        )


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Ranks with the same stages, planned by the first of them."""

    ranks: tuple[int, ...]
    stages: Mapping[str, int]
    """Pipeline stage by role."""
    roles: tuple[RoleMemory, ...]
    phases: tuple[PhaseMemory, ...]
    host: HostMemory

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total)


class RankBuilder:
    """Collects what one rank has in each phase."""

    def __init__(
        self,
        config: Config,
        *,
        is_gpu: bool,
        roles: list[RoleMemory],
        reward: ModelArchitecture | None,
        engine: EngineMemory | None,
        batch: Mapping[str, BatchSizes],
        sync_buffers: int,
        num_communicators: int,
    ) -> None:
        self._config, self._is_gpu = config, is_gpu
        self._roles, self._reward, self._engine = roles, reward, engine
        self._batch, self._sync_buffers = batch, sync_buffers
        self._num_communicators = num_communicators

    def planned(self, ranks: tuple[int, ...]) -> RankMemory:
        names = {role.setting.name for role in self._roles}
        names |= {"reward"} if self._reward is not None else set()
        return RankMemory(
            ranks=ranks,
            stages={role.setting.name: role.model.stage for role in self._roles},
            roles=tuple(self._roles),
            phases=tuple(
                self._phase(phase)
                for phase in PHASES
                if phase.activity == "" or phase.role in names
            ),
            host=host_memory(
                self._config, roles=self._roles, engine=self._engine, is_gpu=self._is_gpu
            ),
        )

    def _phase(self, phase: Phase) -> PhaseMemory:
        if phase.name == RESHARD:
            # The actor's weights and the buffers go, where they may, before the KV cache comes.
            # Of adapters, nothing else travels.
            adapted = any(role.setting.lora_rank for role in self._roles)
            first = replace(phase, uses=()) if adapted else phase
            return max(
                self._at(first, awake=phase.engine, extra=self._sync_buffers),
                self._at(replace(phase, uses=()), awake="awake"),
                key=lambda found: found.total,
            )
        if phase.name == CHECKPOINT:
            size = max((role.checkpoint_workspace for role in self._roles), default=0)
            return self._at(phase, awake=phase.engine, extra=size)
        return self._at(phase, awake=phase.engine)

    def _at(self, phase: Phase, *, awake: Awake, extra: int = 0) -> PhaseMemory:
        """`extra`: bytes of buffers that belong to no role."""
        found = self._pass(phase)
        coming = [Item(owner="job", kind="buffers", num_bytes=extra)]
        if found is not None:
            coming += [
                Item(owner=phase.role, kind=kind, num_bytes=getattr(found, kind))
                for kind in ("activations", "recomputed", "logits", "workspace", "batch")
            ]
        elif phase.role == "reward" and self._reward is not None:
            coming.append(self._reward_workspace())
        items = [*self._resident(phase), *self._engine_items(phase, awake=awake), *coming]
        if self._is_gpu:
            moving = sum(item.num_bytes for item in coming)
            items.append(Item(owner="job", kind="slack", num_bytes=int(SLACK_SHARE * moving)))
            context = CONTEXT_BYTES + self._num_communicators * COMMUNICATOR_BYTES
            items.append(Item(owner="job", kind="context", num_bytes=context))
        return PhaseMemory(
            phase=phase.name,
            items=tuple(item for item in items if item.num_bytes),
            instant=found.instant if found is not None else "",
        )

    def _resident(self, phase: Phase) -> Iterator[Item]:
        """Of the roles, as far as it is not offloaded."""
        for role in self._roles:
            name, offload = role.setting.name, role.setting.offload
            for part, size in role.resident.items():
                is_needed = (name, part) in phase.uses or not self._is_gpu
                if is_needed or not getattr(offload, part):
                    yield Item(owner=name, kind=part, num_bytes=size)
        if self._reward is not None:
            size = num_parameters(self._reward, head="value") * FP32_BYTES
            yield Item(owner="reward", kind="weights", num_bytes=size)

    def _engine_items(self, phase: Phase, *, awake: Awake) -> Iterator[Item]:
        engine = self._engine
        if engine is None:
            return
        if phase.name == SETUP:  # what vLLM wants to find free, or takes
            asked = max(engine.asks_for, engine.awake)
            yield Item(owner="engine", kind="asked for", num_bytes=asked)
            return
        if self._config.rollout.sleep_level == 0 or engine.asks_for == 0:
            awake = "awake"  # it never sleeps, nor does it on a CPU
        yield Item(owner="engine", kind="cuda_graphs", num_bytes=engine.cuda_graphs)
        yield Item(owner="engine", kind="context", num_bytes=engine.context)
        if awake != "asleep":
            yield Item(owner="engine", kind="weights", num_bytes=engine.weights)
        if awake == "awake":
            yield Item(owner="engine", kind="kv_cache", num_bytes=engine.kv_cache)
        if phase.name == "rollout":
            yield Item(owner="engine", kind="workspace", num_bytes=engine.workspace)

    def _pass(self, phase: Phase) -> PassMemory | None:
        role = next((r for r in self._roles if r.setting.name == phase.role), None)
        if role is None or not phase.activity:
            return None
        sizes = self._batch[phase.role]
        if phase.activity == "inference":
            return inference_pass(role.model, sizes=sizes)
        return update_pass(role, sizes=sizes)

    def _reward_workspace(self) -> Item:
        """A padded batch through a layer of the reward model, in float32."""
        arch = self._reward
        assert arch is not None
        tokens = self._config.reward.model_batch_samples * longest_tokens(self._config)
        width = 4 * arch.hidden_size + 3 * arch.ffn_hidden_size
        return Item(owner="reward", kind="workspace", num_bytes=tokens * width * FP32_BYTES)
