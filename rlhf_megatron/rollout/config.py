"""Options of the rollout engines and of sampling."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.schema import choice, items, number


@dataclass(kw_only=True)
class RolloutConfig:
    """Which engine generates, on which ranks, how many samples, and how they are drawn."""

    engine: str = choice("auto", "vllm", "hf")
    """auto (default): vLLM where it imports, else transformers' generate; the log says which."""

    tensor_parallel_size: int = number(1, minimum=1)
    """Ranks of one engine. Must divide the number of rollout ranks. With "hf" only 1."""

    engines: str = "auto"
    """Ascending rank lists, one engine each: "0,2;1,3". "auto" (default) divides `ranks` so that
    the fewest bytes move on each weight sync."""

    ranks: str = "all"
    """Global ranks that roll out, ascending: "all" (default, the actor's ranks) or "2-3"."""

    prompts_per_step: int = number(64, minimum=1)
    """Prompts drawn in each PPO step, over all engines. Default 64."""

    responses_per_prompt: int = number(1, minimum=1)
    """Samples per prompt. prompts_per_step x responses_per_prompt samples make one step."""

    max_prompt_tokens: int = number(1024, minimum=1)
    """Longest prompt in tokens; a longer one is refused (data.long_prompts). Default 1024."""

    max_response_tokens: int = number(1024, minimum=1)
    """Longest response in tokens; one that reaches it without EOS is truncated. Prompt and
    response together must fit the model's context. Default 1024."""

    temperature: float = number(1.0, minimum=0, maximum=2, exclusive=True)
    """Sampling temperature. Actor, old and reference log-probs are taken at the same one."""

    top_p: float = number(1.0, minimum=0, maximum=1, exclusive=True)
    """Must stay 1 in training: a cut tail makes sampled and trained distributions differ."""

    top_k: int = number(-1, minimum=-1)
    """Must stay -1 (off) in training, for the same reason as top_p."""

    stop_token_ids: list[int] = items()
    """Token ids that end a response, beside the model's EOS. The stop token is part of the
    response."""

    stop_tokens: list[str] = items()
    """The same by name; each must be one token of the tokenizer."""

    seed_per: str = choice("request", "engine")
    """request (default): each response has a seed from (run.seed, step, prompt, sample index), so
    results do not depend on the number of engines. engine: one seed per engine replica, cheaper
    where the engine's per-request generators cost too much."""

    kv_cache_memory_gb: float = number(0.0, minimum=0)
    """KV cache of one rank in 10^9 bytes. 0 (default): on a GPU what gpu_memory_utilization
    leaves, on a CPU the room for max_num_seqs full-length sequences."""

    gpu_memory_utilization: float = number(0.5, minimum=0, maximum=1, exclusive=True)
    """Share of the GPU's memory that the vLLM engine may use, weights included. Default 0.5."""

    max_num_seqs: int = number(256, minimum=1)
    """Sequences that one engine decodes at once. Default 256."""

    max_num_batched_tokens: int = number(0, minimum=0)
    """Tokens that one forward pass of the engine takes. 0 (default): vLLM's choice."""

    enable_chunked_prefill: bool = True
    """Cut long prompts over several forward passes, beside sequences that decode. Default true;
    without it max_num_batched_tokens must hold a whole prompt and response."""

    block_size: int = number(0, minimum=0)
    """Tokens of a block of the KV cache. 0 (default): vLLM's choice, on a CPU 32."""

    enforce_eager: bool = False
    """Run the engine without CUDA graphs and compilation. Always so on a CPU. Default false."""

    sleep_level: int = number(1, minimum=0, maximum=2)
    """What the engine gives up between rollouts on a GPU: 0 nothing, 1 (default) weights to host
    and KV cache dropped, 2 both dropped. No effect on a CPU."""

    sleep_residual_gb: float = number(0.0, minimum=0)
    """Most memory, in 10^9 bytes, that may be in use on a GPU when the engine sleeps, beside what
    roles keep there: CUDA contexts, communicators, the engine's rest (1 to 3 GB), a reward model.
    All processes on the GPU count. 0 (default): 2 GB more than in the second
    step."""

    timeout_seconds: float = number(0.0, minimum=0)
    """A rollout that takes longer ends the run, with a message that names the rank and what it was
    at: an engine in the same process cannot be interrupted and used again. 0 (default): the limit
    is faults.phase_limit_seconds, as for every phase."""

    weight_update: str = choice("auto", "reload")
    """How new weights reach the engine. auto (default): written in place, or through vLLM's own
    reload where the engine lays its weights out in a way of its own (quantised and some mixture
    models); a line says which. reload: always the latter, for which every rollout rank receives
    each tensor whole, bucket by bucket."""

    engine_args: dict[str, Any] = items(dict)
    """Further arguments for vLLM's LLM(), passed on as they are. Names that it does not know are
    refused, and those that the trainer sets."""


ENGINE_ARGS_WITH_KEYS = {
    "model": "actor.model",
    "dtype": "actor.precision",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "max_model_len": "rollout.max_prompt_tokens and rollout.max_response_tokens",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "enable_chunked_prefill": "rollout.enable_chunked_prefill",
    "block_size": "rollout.block_size",
    "enforce_eager": "rollout.enforce_eager",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_memory_gb",
    "enable_sleep_mode": "rollout.sleep_level",
}
"""Arguments of LLM() that have a key of their own."""

ENGINE_ARGS_SET_HERE = {
    "skip_tokenizer_init": "token ids go in and come out",
    "generation_config": "stop tokens come with each request",
    "load_format": "the weights come from the actor",
    "logprobs_mode": "log-probs must be those of the tempered distribution",
    "distributed_executor_backend": "the engine lives in the trainer's processes",
    "pipeline_parallel_size": "an engine holds whole layers, cut by tensor parallelism alone",
    "data_parallel_size": "rollout.engines gives each engine its ranks",
}
"""Arguments of LLM() that the trainer sets, and why."""


def refused_engine_args(engine_args: Mapping[str, Any]) -> list[str]:
    """Problems of `rollout.engine_args` that need no vLLM to be seen."""
    problems = []
    for name in sorted(engine_args):
        at = f"rollout.engine_args.{name}"
        if name in ENGINE_ARGS_WITH_KEYS:
            key = ENGINE_ARGS_WITH_KEYS[name]
            problems.append(f"{at}: has a key of its own; set {key} instead")
        elif name in ENGINE_ARGS_SET_HERE:
            reason = ENGINE_ARGS_SET_HERE[name]
            problems.append(f"{at}: is set by the trainer, since {reason}; remove it")
    return problems
