"""The changes that the planner tries: keys, values, and what each costs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import floor
from typing import Any

from rlhf_megatron.config import Config
from rlhf_megatron.memory.plan import MemoryPlan
from rlhf_megatron.memory.rollout import longest_tokens
from rlhf_megatron.shared_backbone import trained_roles

CHEAP, SLOWER, LAYOUT = 1, 2, 3
UTILIZATION_STEP = 0.05
PARTS = ("optimizer", "gradients", "weights")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One change. It may be refused by the rules of the configuration, or gain nothing."""

    values: Mapping[str, Any]
    cost: str
    effort: int


def candidates(config: Config, *, plan: MemoryPlan) -> Iterator[Candidate]:
    """All that may help `config`, whose plan is `plan`."""
    yield from _offload(config, plan=plan)
    yield from _engine(config, plan=plan)
    yield from _passes(config)
    yield from _fused_adam(config, plan=plan)
    yield from _layouts(config, gpus_per_node=plan.machine.gpus_per_node)


def _offload(config: Config, *, plan: MemoryPlan) -> Iterator[Candidate]:
    for name, role in trained_roles(config).items():
        resident = next((r.resident for r in plan.worst.roles if r.setting.name == name), None)
        for part in PARTS:
            key = f"offload_{part}"
            if resident is None or getattr(role, key):
                continue
            size = resident[part] / 1e9  # type: ignore[index]
            cost = (
                "allocated anew for each update; nothing is copied"
                if part == "gradients"
                else f"{size:.1f} GB a GPU to the host and back in each step, and as much of the "
                "host's memory, pinned"
            )
            yield Candidate(values={f"{name}.{key}": True}, cost=cost, effort=CHEAP)
    if not config.ref.offload and config.ppo.kl.place != "off":
        yield Candidate(
            values={"ref.offload": True},
            cost="the reference's weights cross to the GPU and back in each step",
            effort=CHEAP,
        )


def _engine(config: Config, *, plan: MemoryPlan) -> Iterator[Candidate]:
    rollout, limit = config.rollout, plan.machine.gpu_memory_bytes
    if rollout.sleep_level == 0:
        yield Candidate(
            values={"rollout.sleep_level": 1},
            cost="the engine sleeps and wakes in each step, its weights in the host's memory",
            effort=CHEAP,
        )
    if rollout.sleep_level == 1:
        yield Candidate(
            values={"rollout.sleep_level": 2},
            cost="the engine's weights are dropped, and every rollout needs a weight sync first",
            effort=CHEAP,
        )
    if limit is None:
        return
    if rollout.kv_cache_memory_gb > 0:
        yield Candidate(
            values={"rollout.kv_cache_memory_gb": rollout.kv_cache_memory_gb / 2},
            cost="half the KV cache: fewer sequences at once, a slower rollout",
            effort=SLOWER,
        )
    else:
        yield from _utilization(config, plan=plan, limit=limit)
    yield Candidate(
        values={"rollout.tensor_parallel_size": 2 * rollout.tensor_parallel_size},
        cost="half as many engines of twice the GPUs: half the weights on each, and all-reduces "
        "between more GPUs at every token",
        effort=SLOWER,
    )


def _utilization(config: Config, *, plan: MemoryPlan, limit: int) -> Iterator[Candidate]:
    """As low as the phases with the engine awake need, or as high as one sequence needs."""
    rollout, capacity = config.rollout, plan.engine.capacity
    awake = ("setup", "rollout", "reward", "reshard", "checkpoint")
    most = max(p.total for p in plan.worst.phases if p.phase in awake)
    missing = capacity.sequence_tokens - capacity.tokens
    if missing > 0:
        wanted = rollout.gpu_memory_utilization + (missing * capacity.token_bytes) / limit
        wanted += UTILIZATION_STEP
    else:
        wanted = rollout.gpu_memory_utilization - (most - limit) / limit
    value = round(floor(wanted / UTILIZATION_STEP) * UTILIZATION_STEP, 2)
    if 0 < value < 1 and value != rollout.gpu_memory_utilization:
        less = value < rollout.gpu_memory_utilization
        yield Candidate(
            values={"rollout.gpu_memory_utilization": value},
            cost="a smaller KV cache: fewer sequences at once, a slower rollout"
            if less
            else "more of the GPU for the engine",
            effort=SLOWER if less else CHEAP,
        )


def _passes(config: Config) -> Iterator[Candidate]:
    longest = longest_tokens(config)
    if config.ppo.micro_batch_tokens > longest:
        yield Candidate(
            values={"ppo.micro_batch_tokens": max(longest, config.ppo.micro_batch_tokens // 2)},
            cost="more and smaller passes, each with less to do; the gradient stays the same",
            effort=CHEAP,
        )
    for name, role in trained_roles(config).items():
        if role.recompute.granularity != "full" or role.recompute.num_layers:
            yield Candidate(
                values={
                    f"{name}.recompute.granularity": "full",
                    f"{name}.recompute.num_layers": 0,
                },
                cost=f"the {name}'s update computes each layer's forward pass twice: about a third "
                "more time",
                effort=SLOWER,
            )


def _fused_adam(config: Config, *, plan: MemoryPlan) -> Iterator[Candidate]:
    if plan.machine.gpu_memory_bytes is not None and config.actor.layer_spec == "auto":
        yield Candidate(
            values={f"{name}.layer_spec": "transformer_engine" for name in trained_roles(config)},
            cost="Transformer Engine has to be installed; its AdamW needs no workspace",
            effort=CHEAP,
        )


def _layouts(config: Config, *, gpus_per_node: int) -> Iterator[Candidate]:
    """Of all roles that have the actor's layout now, so that they keep sharing it."""
    actor = config.actor.parallel
    roles = [
        name
        for name, role in (*trained_roles(config).items(), ("ref", config.ref))
        if role.parallel == actor
    ]

    def of_all(**values: Any) -> dict[str, Any]:
        return {f"{name}.parallel.{key}": value for name in roles for key, value in values.items()}

    tensor, pipeline = actor.tensor_model_parallel_size, actor.pipeline_model_parallel_size
    if tensor > 1 and not actor.sequence_parallel:
        yield Candidate(
            values=of_all(sequence_parallel=True),
            cost="none in bytes: all-reduces become pairs of reduce-scatter and all-gather",
            effort=CHEAP,
        )
    fixed = {"data_parallel_size": 0}
    if 2 * tensor <= gpus_per_node:
        yield Candidate(
            values=of_all(tensor_model_parallel_size=2 * tensor, sequence_parallel=True, **fixed),
            cost="half the replicas, and more communication in every layer",
            effort=LAYOUT,
        )
    yield Candidate(
        values=of_all(pipeline_model_parallel_size=2 * pipeline, **fixed),
        cost="half the replicas, and pipeline bubbles: more micro-batches are wanted",
        effort=LAYOUT,
    )
