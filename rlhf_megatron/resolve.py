"""What a configuration comes to for a given number of processes: layouts, engines, batch sizes."""

from rlhf_megatron.config import Config
from rlhf_megatron.distributed.config import ParallelConfig
from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.parallel import ParallelLayout, parse_ranks
from rlhf_megatron.shared_backbone import trained_roles


def parallel_layout(parallel: ParallelConfig, *, world_size: int) -> ParallelLayout:
    """A role's ranks as a grid, with data_parallel_size resolved.

    Raises UserError where the sizes do not fit the ranks; `validation.validate` says the same with
    the role's name.
    """
    try:
        ranks = parse_ranks(parallel.ranks, default=range(world_size))
    except ValueError as error:
        raise UserError(f"ranks={parallel.ranks}: {error}") from error
    tensor, pipeline = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
    )
    data = parallel.data_parallel_size or len(ranks) // (tensor * pipeline)
    if tensor * pipeline * data != len(ranks):
        raise UserError(
            f"tensor_model_parallel_size={tensor} x pipeline_model_parallel_size={pipeline} x "
            f"data_parallel_size={data}: must give the {len(ranks)} ranks of the role"
        )
    return ParallelLayout(
        ranks=ranks,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        data_parallel_size=data,
        order=tuple(parallel.grid_order.split("-")),
        sequence_parallel=parallel.sequence_parallel,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
    )


def rollout_ranks(config: Config, *, world_size: int) -> tuple[int, ...]:
    """Global ranks that roll out, ascending; "all" means the actor's."""
    actor = parse_ranks(config.actor.parallel.ranks, default=range(world_size))
    return parse_ranks(config.rollout.ranks, default=actor)


def num_engines(config: Config, *, world_size: int) -> int:
    """Rollout engines, as listed or as many as the rollout ranks give."""
    if config.rollout.engines != "auto":
        return len(config.rollout.engines.split(";"))
    ranks = rollout_ranks(config, world_size=world_size)
    return len(ranks) // config.rollout.tensor_parallel_size


def describe_batch(config: Config, *, world_size: int) -> str:
    """The arithmetic of a valid configuration's batches in words, one line a part."""
    rollout, ppo = config.rollout, config.ppo
    samples = rollout.prompts_per_step * rollout.responses_per_prompt
    mini_batches = samples // ppo.mini_batch_samples
    engines = num_engines(config, world_size=world_size)
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    lines = [
        f"{_count(rollout.prompts_per_step, 'prompt')} x "
        f"{_count(rollout.responses_per_prompt, 'response')} = "
        f"{_count(samples, 'sample')} per step, each at most {rollout.max_prompt_tokens} prompt + "
        f"{rollout.max_response_tokens} response = {longest} tokens",
        f"rollout: {_count(engines, 'engine')} of TP{rollout.tensor_parallel_size}, about "
        f"{_share(rollout.prompts_per_step, engines)} prompts per engine",
        f"{_count(mini_batches, 'mini-batch')} of {_count(ppo.mini_batch_samples, 'sample')} x "
        f"{_count(ppo.epochs, 'epoch')} = {_count(mini_batches * ppo.epochs, 'optimizer step')} "
        "per PPO step",
    ]
    for role, options in trained_roles(config).items():
        layout = parallel_layout(options.parallel, world_size=world_size)
        replicas = layout.data_parallel_size
        lines.append(
            f"{role}: TP{layout.tensor_model_parallel_size} x "
            f"PP{layout.pipeline_model_parallel_size} x DP{replicas}, about "
            f"{_share(ppo.mini_batch_samples, replicas)} samples per replica and mini-batch, "
            f"{_micro_batches(config, replicas=replicas)}"
        )
    return "\n".join(lines)


def num_micro_batches(config: Config, *, replicas: int, sample_tokens: int) -> int:
    """Packed micro-batches of a mini-batch on each replica, if all samples were so long."""
    ppo = config.ppo
    samples = -(-ppo.mini_batch_samples // replicas)
    together = max(1, ppo.micro_batch_tokens // sample_tokens)
    if ppo.micro_batch_samples:
        together = min(together, ppo.micro_batch_samples)
    return -(-samples // together)


def _micro_batches(config: Config, *, replicas: int) -> str:
    """Samples differ in length: the number at half the longest, and the most."""
    ppo, rollout = config.ppo, config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    about, most = (
        num_micro_batches(config, replicas=replicas, sample_tokens=max(1, tokens))
        for tokens in (longest // 2, longest)
    )
    text = f"in about {_count(about, 'packed micro-batch')} of "
    text += f"at most {_count(ppo.micro_batch_tokens, 'token')}"
    if ppo.micro_batch_samples:
        text += f" and {_count(ppo.micro_batch_samples, 'sample')}"
    return f"{text} ({most} if every sample is of full length)"


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('batch') else 's'}"


def _share(total: int, parts: int) -> str:
    return f"{total / parts:.1f}".removesuffix(".0")
