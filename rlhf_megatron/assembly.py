"""Puts a run together: roles, engines, data and reward, from the configuration.

Each function makes one part; trainer.py holds them.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_megatron.architectures import Architectures
from rlhf_megatron.checkpoint.hf_read import load_hf_checkpoint
from rlhf_megatron.config import Config
from rlhf_megatron.data.prompts import Demonstration, PromptSet, load_demonstrations, load_prompts
from rlhf_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rlhf_megatron.distributed.groups import GroupFactory, RoleGroups, build_role_groups
from rlhf_megatron.distributed.start import DistributedContext, release_cached_memory
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.tensors import Head
from rlhf_megatron.models.build import (
    LM_HEAD,
    NO_RECOMPUTE,
    VALUE_HEAD,
    build_model,
    use_transformer_engine,
)
from rlhf_megatron.models.config import ActorConfig, CriticConfig, ReferenceConfig
from rlhf_megatron.placed_role import PlacedRole
from rlhf_megatron.placement import RolloutPlacement, place_engines
from rlhf_megatron.resolve import parallel_layout
from rlhf_megatron.rewards.contract import Scorer
from rlhf_megatron.rewards.function import FunctionScorer, check_arguments, load_reward_function
from rlhf_megatron.rewards.model import ModelScorer
from rlhf_megatron.rewards.pool import WorkerPool
from rlhf_megatron.rewards.remote import RemoteScorer
from rlhf_megatron.role_exchange import ExchangeGroups, build_exchange_groups
from rlhf_megatron.role_ranks import RolePlacement, role_placement
from rlhf_megatron.rollout import vllm_fit
from rlhf_megatron.rollout.contract import RolloutEngine
from rlhf_megatron.rollout.engine_ranks import check_engine_size
from rlhf_megatron.rollout.factory import (
    ResolvedEngine,
    build_engine,
    check_head_size,
    resolve_engine,
)
from rlhf_megatron.rollout.worlds import make_engine_groups
from rlhf_megatron.shared_backbone import actor_head
from rlhf_megatron.weight_sync import copy_weights

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Data:
    """Prompts and texts."""

    tokenizer: Tokenizer
    prompts: PromptSet
    evaluation: PromptSet | None
    demonstrations: list[Demonstration]


def load_data(config: Config, *, architectures: Architectures) -> Data:
    """Read and tokenize all files. Raises UserError."""
    data = config.data
    tokenizer = load_tokenizer(
        data.tokenizer or config.actor.model, trust_remote_code=config.run.trust_remote_code
    )
    prompts = load_prompts(
        data.prompts,
        tokenizer=tokenizer,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        prompt_field=data.prompt_field,
        long_prompts=data.long_prompts,
        add_bos=data.add_bos,  # type: ignore[arg-type]
    )
    if prompts.dropped_long:
        logger.warning("data.prompts: %d prompts too long, left out", prompts.dropped_long)
    evaluation = None
    if config.evaluation.prompts:
        evaluation = load_prompts(
            config.evaluation.prompts,
            tokenizer=tokenizer,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            prompt_field=data.prompt_field,
            long_prompts=data.long_prompts,
            add_bos=data.add_bos,  # type: ignore[arg-type]
            max_prompts=config.evaluation.max_prompts,
            key="evaluation.prompts",
        )
    demonstrations: list[Demonstration] = []
    if config.warmup.steps > 0:
        demonstrations = load_demonstrations(
            config.warmup.demonstrations,
            tokenizer=tokenizer,
            max_tokens=architectures.actor.max_position_embeddings,
            prompt_field=data.prompt_field,
            response_field=config.warmup.response_field,
            add_bos=data.add_bos,  # type: ignore[arg-type]
        )
    return Data(
        tokenizer=tokenizer,
        prompts=prompts,
        evaluation=evaluation,
        demonstrations=demonstrations,
    )


def stop_token_ids(
    config: Config, *, tokenizer: Tokenizer, arch: ModelArchitecture
) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's and the model's EOS, and the config's."""
    named = [tokenizer.token_id(name) for name in config.rollout.stop_tokens]
    return tuple(
        sorted(
            {
                *tokenizer.eos_token_ids,
                *arch.eos_token_ids,
                *config.rollout.stop_token_ids,
                *named,
            }
        )
    )


def scores_in_background(config: Config) -> bool:
    """Whether responses are scored by other processes while the ranks do something else."""
    reward = config.reward
    return not reward.model and bool(reward.remote.endpoints or reward.workers)


def build_scorer(config: Config, *, prompts: PromptSet, rank: int, device: torch.device) -> Scorer:
    """The reward of the configuration, on a rank of the reward role. Raises UserError where it
    cannot be loaded or called, and where no reward server is well."""
    reward, fields = config.reward, list(prompts.rows[0].fields)
    if reward.model:
        return ModelScorer(
            reward.model,
            device=device,
            batch_samples=reward.model_batch_samples,
            trust_remote_code=reward.trust_remote_code,
        )
    if reward.remote.endpoints:
        remote = RemoteScorer(reward.remote)
        remote.check()
        return remote
    if reward.workers:
        return WorkerPool(
            reward.function,
            workers=reward.workers,
            timeout_seconds=reward.timeout_seconds,
            fields=fields,
            log_folder=Path(config.run.output_dir) / "logs",
            name=f"rank_{rank:04d}",
        )
    function = load_reward_function(reward.function)
    check_arguments(function, spec=reward.function, fields=fields)
    return FunctionScorer(function, timeout_seconds=reward.timeout_seconds)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The process groups of all roles, as far as this rank is in them."""

    placement: RolePlacement
    roles: Mapping[str, RoleGroups | None]
    """Of the Megatron models; None where this rank has no part of one."""
    exchange: ExchangeGroups


def build_groups(config: Config, *, context: DistributedContext) -> Groups:
    """One process group collection per role; roles of one layout on the same ranks share groups."""
    placement = role_placement(config, world_size=context.world_size)
    factory = GroupFactory(timeout_seconds=context.timeout_seconds, backend=context.backend)
    found = {
        role: build_role_groups(
            role,
            layout=parallel_layout(options.parallel, world_size=context.world_size),
            factory=factory,
        )
        for role, options in role_options(config).items()
        if role in placement.ranks
    }
    exchange = build_exchange_groups(placement, factory=factory, rank=context.rank)
    return Groups(placement=placement, roles=found, exchange=exchange)


RoleConfig = ActorConfig | CriticConfig | ReferenceConfig


def role_options(config: Config) -> dict[str, RoleConfig]:
    """Of the Megatron models."""
    return {"actor": config.actor, "critic": config.critic, "ref": config.ref}


def _build_role(
    arch: ModelArchitecture,
    *,
    name: str,
    options: RoleConfig,
    head: Head,
    groups: RoleGroups | None,
    seed: int,
    context: DistributedContext,
) -> PlacedRole:
    """The role with random weights; on a rank outside of it, what it is alone."""
    engine = None
    if groups is not None:
        model = build_model(
            arch,
            head=head,
            groups=groups,
            precision=options.precision,
            layer_spec_name=options.layer_spec,
            recompute=getattr(options, "recompute", NO_RECOMPUTE),
            device=context.device,
            fp8=options.fp8,
            seed=seed,
        )
        engine = ModelEngine(
            model,
            device=context.device,
            optimizer_config=getattr(options, "optimizer", None),
            kept_logits_bytes=int(getattr(options, "kept_logits_gb", 0.0) * 1e9),
        )
    return PlacedRole(
        name=name,
        arch=arch,
        head=head,
        layout=parallel_layout(options.parallel, world_size=context.world_size),
        dtype=DTYPES[options.precision],
        fused_norms=use_transformer_engine(options.layer_spec, device=context.device),
        engine=engine,
    )


def _load(engine: ModelEngine, *, directory: str, rank: int) -> None:
    model = engine.model
    report = load_hf_checkpoint(
        directory,
        layout=model.rank_layout(rank),
        parameters=model.parameters(),
        arch=model.arch,
        head=model.head,
    )
    engine.weights_changed()
    logger.info(
        "%s: read %.1f MB of %s%s",
        model.groups.role,
        report.bytes_read / 1e6,
        directory,
        "; the value head starts at 0"
        if model.head != LM_HEAD and not report.value_head_loaded
        else "",
    )


def build_actor(
    config: Config, *, arch: ModelArchitecture, groups: Groups, context: DistributedContext
) -> PlacedRole:
    """The actor with the weights of its directory; with a shared backbone the value head is 0."""
    actor = _build_role(
        arch,
        name="actor",
        options=config.actor,
        head=actor_head(config),
        groups=groups.roles["actor"],
        seed=config.run.seed,
        context=context,
    )
    if actor.engine is not None:
        _load(actor.engine, directory=config.actor.model, rank=context.rank)
    return actor


def build_critic(
    config: Config,
    *,
    arch: ModelArchitecture | None,
    groups: Groups,
    actor: PlacedRole,
    context: DistributedContext,
) -> PlacedRole | None:
    """The critic, with the weights of its directory or, by default, of the actor as it is now.
    None where it is a head on the actor."""
    if arch is None:
        return None
    critic = _build_role(
        arch,
        name="critic",
        options=config.critic,
        head=VALUE_HEAD,
        groups=groups.roles["critic"],
        seed=config.run.seed,
        context=context,
    )
    _start_weights(critic, directory=config.critic.model, actor=actor, context=context)
    return critic


def build_reference(
    config: Config,
    *,
    arch: ModelArchitecture,
    groups: Groups,
    actor: PlacedRole,
    context: DistributedContext,
) -> PlacedRole:
    """The frozen reference, with the weights of its directory or of the actor as it is now."""
    ref = _build_role(
        arch,
        name="ref",
        options=config.ref,
        head=LM_HEAD,
        groups=groups.roles["ref"],
        seed=config.run.seed,
        context=context,
    )
    _start_weights(ref, directory=config.ref.model, actor=actor, context=context)
    return ref


def _start_weights(
    role: PlacedRole, *, directory: str, actor: PlacedRole, context: DistributedContext
) -> None:
    """Collective over the job."""
    if directory:
        if role.engine is not None:
            _load(role.engine, directory=directory, rank=context.rank)
        return
    copy_weights(
        actor,
        target=role,
        rank=context.rank,
        group=context.job_group,
        device=context.device,
    )
    if role.engine is not None:
        role.engine.weights_changed()


def choose_engine(
    config: Config,
    *,
    arch: ModelArchitecture,
    context: DistributedContext,
    say: Callable[[str], None],
) -> ResolvedEngine:
    """Choose the rollout engine, and say so. Raises UserError where it cannot be had for the
    actor's `arch`."""
    resolved = resolve_engine(
        config.rollout.engine, device=context.device, engine_args=config.rollout.engine_args
    )
    say(f"rollout engine: {resolved.reason}")
    size = config.rollout.tensor_parallel_size
    check_engine_size(resolved.name, tensor_parallel_size=size)
    check_head_size(resolved.name, head_dim=arch.head_dim, device=context.device)
    return resolved


def choose_placement(
    config: Config,
    *,
    resolved: ResolvedEngine,
    actor: PlacedRole,
    context: DistributedContext,
    say: Callable[[str], None],
) -> RolloutPlacement:
    """Choose the engines' ranks, and say so. Raises UserError where they do not fit the model."""
    placement = place_engines(
        config,
        arch=actor.arch,
        source=actor.layouts,
        engine_name=resolved.name,
        world_size=context.world_size,
        node_of=context.node_of,
    )
    size = config.rollout.tensor_parallel_size
    say(f"rollout: {len(placement.engines)} engine(s) of TP{size} on ranks {placement.engines}")
    return placement


def build_rollout_engine(
    config: Config, *, placement: RolloutPlacement, context: DistributedContext
) -> RolloutEngine | None:
    """This rank's engine; None where it does not roll out. Collective over the job."""
    groups = make_engine_groups(placement.engines, device=context.device)
    release_cached_memory(context.device)  # the engine measures what is free
    engine = None
    for replica, (ranks, group) in enumerate(zip(placement.engines, groups, strict=True)):
        if context.rank in ranks:
            engine = build_engine(
                placement.engine_name,
                model_dir=config.actor.model,
                config=config.rollout,
                ranks=ranks,
                replica=replica,
                group=group,
                dtype="bfloat16" if config.actor.precision == "bf16" else "float32",
                run_seed=config.run.seed,
                max_model_len=config.rollout.max_prompt_tokens
                + max(config.rollout.max_response_tokens, config.evaluation.max_response_tokens),
                device=context.device,
                trust_remote_code=config.run.trust_remote_code,
            )
    vllm_fit.level_group_count(device=context.device)
    return engine
