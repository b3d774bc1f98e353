"""Roles for the GPU benchmarks: models with random weights, built as the trainer does."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlhf_megatron.algorithms.config import KlConfig, PpoConfig
from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.distributed.groups import GroupFactory, build_role_groups
from rlhf_megatron.distributed.start import DistributedContext, release_cached_memory
from rlhf_megatron.engine.microbatch import MicroBatch
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.micro_batches import micro_batches_of
from rlhf_megatron.models.build import LM_HEAD, VALUE_HEAD, build_model
from rlhf_megatron.models.config import OptimizerConfig, RecomputeConfig
from rlhf_megatron.ppo import PpoStep

LEARNING_RATE = 1e-6
ONE_RANK = ParallelLayout((0,))


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """How a role's model is built."""

    precision: str
    layer_spec: str
    recompute: str = "none"
    kept_logits_gb: float = 0.0
    fp8: bool = False


def build_role(
    role: str,
    *,
    arch: ModelArchitecture,
    options: RoleOptions,
    context: DistributedContext,
    factory: GroupFactory,
    trained: bool = True,
    layout: ParallelLayout = ONE_RANK,
) -> ModelEngine:
    """The actor or the critic, on a rank of `layout`."""
    groups = build_role_groups(role, layout=layout, factory=factory)
    assert groups is not None
    model = build_model(
        arch,
        head=VALUE_HEAD if role == "critic" else LM_HEAD,
        groups=groups,
        precision=options.precision,
        layer_spec_name=options.layer_spec,
        fp8=options.fp8,
        recompute=RecomputeConfig(granularity=options.recompute),
        device=context.device,
        seed=1,
    )
    return ModelEngine(
        model,
        device=context.device,
        optimizer_config=OptimizerConfig(learning_rate=LEARNING_RATE) if trained else None,
        **(
            {"kept_logits_bytes": int(1e9 * options.kept_logits_gb)}
            if options.kept_logits_gb
            else {}
        ),
    )


def ppo_step(
    *,
    actor: ModelEngine | None = None,
    critic: ModelEngine | None = None,
    micro_batch_tokens: int,
    max_response_tokens: int,
) -> PpoStep:
    """Without a KL penalty, whose reference pass is another log-prob pass."""
    return PpoStep(
        PpoConfig(micro_batch_tokens=micro_batch_tokens, kl=KlConfig(place="off")),
        actor=actor,
        critic=critic,
        ref=None,
        temperature=1.0,
        max_response_tokens=max_response_tokens,
        seed=0,
    )


def micro_batches(
    engine: ModelEngine, *, batch: RaggedBatch, samples: Sequence[int], micro_batch_tokens: int
) -> list[MicroBatch]:
    """Those of one update on `samples`."""
    return micro_batches_of(
        engine,
        batch=batch,
        samples=samples,
        fields=(),
        micro_batch_tokens=micro_batch_tokens,
    )


def new_factory(context: DistributedContext) -> GroupFactory:
    return GroupFactory(timeout_seconds=context.timeout_seconds, backend=context.backend)


def settle(device: torch.device) -> None:
    """Free what is gone, and take what stays out of the collector's sight, as Trainer.fit does."""
    gc.unfreeze()
    gc.collect()
    release_cached_memory(device)
    gc.freeze()
