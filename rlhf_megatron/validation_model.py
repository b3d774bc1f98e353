"""The rules of a configuration that need the numbers of its models."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from rlhf_megatron.config import Config
from rlhf_megatron.distributed.config import ParallelConfig
from rlhf_megatron.layout.vllm import padded_vocab_size
from rlhf_megatron.models.config import ActorConfig, CriticConfig, ReferenceConfig
from rlhf_megatron.validation import listed


class ModelNumbers(Protocol):
    """What the rules read of a model's architecture; any object with these attributes will do."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


def validate_model(
    config: Config,
    *,
    actor: ModelNumbers,
    critic: ModelNumbers | None = None,
    ref: ModelNumbers | None = None,
) -> list[str]:
    """Problems of the layouts, lengths and vocabularies. A critic or ref of None is the actor's."""
    models = {"actor": actor}
    if not config.critic.shared_backbone:
        models["critic"] = critic or actor
    if config.ppo.kl.place != "off":  # otherwise there is no reference
        models["ref"] = ref or actor
    roles: dict[str, ActorConfig | CriticConfig | ReferenceConfig] = {
        "actor": config.actor,
        "critic": config.critic,
        "ref": config.ref,
    }
    problems: list[str] = []
    for role, model in models.items():
        directory = roles[role].model or config.actor.model
        problems += _layout(roles[role].parallel, model=model, role=role, directory=directory)
        problems += _recomputed_layers(roles[role], model=model, role=role)
    rollout_size = config.rollout.tensor_parallel_size
    problems += _tensor_size(
        rollout_size,
        key="rollout.tensor_parallel_size",
        model=actor,
        directory=config.actor.model,
    )
    if padded_vocab_size(actor.vocab_size) % rollout_size:
        problems.append(
            f"rollout.tensor_parallel_size={rollout_size}: must divide the vocabulary of "
            f"{config.actor.model}, which vLLM pads to {padded_vocab_size(actor.vocab_size)}; take "
            "a power of 2"
        )
    return [*problems, *_lengths(config, models=models), *_vocabularies(config, models=models)]


def _layout(
    parallel: ParallelConfig, *, model: ModelNumbers, role: str, directory: str
) -> Iterator[str]:
    at = f"{role}.parallel"
    yield from _tensor_size(
        parallel.tensor_model_parallel_size,
        key=f"{at}.tensor_model_parallel_size",
        model=model,
        directory=directory,
        broken_rules=broken_training_rules,
    )
    pipeline = parallel.pipeline_model_parallel_size
    if model.num_layers % pipeline:
        fitting = [n for n in range(1, model.num_layers + 1) if model.num_layers % n == 0]
        yield (
            f"{at}.pipeline_model_parallel_size={pipeline}: must divide the {model.num_layers} "
            f"layers of {directory}; take {listed(fitting)}"
        )
        return
    virtual = parallel.virtual_pipeline_model_parallel_size
    per_stage = model.num_layers // pipeline
    if per_stage % virtual:
        fitting = [n for n in range(1, per_stage + 1) if per_stage % n == 0]
        yield (
            f"{at}.virtual_pipeline_model_parallel_size={virtual}: must divide the {per_stage} "
            f"layers of a stage of {directory}; take {listed(fitting)}"
        )


def _recomputed_layers(
    options: ActorConfig | CriticConfig | ReferenceConfig, *, model: ModelNumbers, role: str
) -> Iterator[str]:
    if isinstance(options, ReferenceConfig):
        return
    parallel, asked = options.parallel, options.recompute.num_layers
    stages = parallel.pipeline_model_parallel_size * parallel.virtual_pipeline_model_parallel_size
    per_stage = max(model.num_layers // stages, 1)
    if asked > per_stage:
        yield (
            f"{role}.recompute.num_layers={asked}: a stage has {per_stage} layers; take at most "
            f"{per_stage}, or 0 for all"
        )


def broken_tensor_rules(size: int, *, model: ModelNumbers) -> list[str]:
    """What keeps a model from being cut into `size` tensor-parallel shards."""
    rules = []
    if model.num_attention_heads % size:
        rules.append(f"must divide the {model.num_attention_heads} attention heads")
    if model.ffn_hidden_size % size:
        rules.append(f"must divide the feed-forward width {model.ffn_hidden_size}")
    if model.num_key_value_heads % size and size % model.num_key_value_heads:
        rules.append(
            f"must divide the {model.num_key_value_heads} key-value heads or be a multiple of them"
        )
    return rules


def broken_training_rules(size: int, *, model: ModelNumbers) -> list[str]:
    """The same for Megatron-Core, which cuts the stacked rows of query, key and value evenly, also
    where KV heads are fewer than shards, and the hidden size."""
    rules = broken_tensor_rules(size, model=model)
    if model.hidden_size % size:
        rules.append(f"must divide the hidden size {model.hidden_size}")
    rows = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    if rows % size:
        rules.append(f"must divide the {rows} rows of query, key and value")
    return rules


def _tensor_size(
    size: int,
    *,
    key: str,
    model: ModelNumbers,
    directory: str,
    broken_rules: Callable[..., list[str]] = broken_tensor_rules,
) -> Iterator[str]:
    rules = broken_rules(size, model=model)
    if rules:
        candidates = range(1, model.num_attention_heads + 1)
        fitting = [n for n in candidates if not broken_rules(n, model=model)]
        yield f"{key}={size}: {' and '.join(rules)} of {directory}; take {listed(fitting)}"


def _lengths(config: Config, *, models: Mapping[str, ModelNumbers]) -> Iterator[str]:
    rollout = config.rollout
    role = min(models, key=lambda r: models[r].max_position_embeddings)
    context = models[role].max_position_embeddings
    for key, response in (
        ("rollout.max_response_tokens", rollout.max_response_tokens),
        ("evaluation.max_response_tokens", config.evaluation.max_response_tokens),
    ):
        if rollout.max_prompt_tokens + response > context:
            yield (
                f"{key}={response}: with rollout.max_prompt_tokens={rollout.max_prompt_tokens} it "
                f"must fit the context of {context} tokens of the {role}'s model; "
                + (
                    f"take at most {context - rollout.max_prompt_tokens}"
                    if rollout.max_prompt_tokens < context
                    else f"take rollout.max_prompt_tokens below {context}"
                )
            )


def _vocabularies(config: Config, *, models: Mapping[str, ModelNumbers]) -> Iterator[str]:
    actor = models["actor"]
    directories = {"critic": config.critic.model, "ref": config.ref.model}
    for role, model in models.items():
        if model.vocab_size != actor.vocab_size:
            yield (
                f"{role}.model={directories[role]}: its vocabulary of {model.vocab_size} tokens "
                f"must equal the actor's of {actor.vocab_size}; take one with the same tokenizer"
            )
    beyond = [t for t in config.rollout.stop_token_ids if t >= actor.vocab_size]
    if beyond:
        yield (
            f"rollout.stop_token_ids={config.rollout.stop_token_ids}: {beyond[0]} is outside the "
            f"vocabulary of {actor.vocab_size} tokens; take ids below {actor.vocab_size}"
        )
