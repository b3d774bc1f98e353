"""Options of the rollout engines and of sampling."""

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

    enforce_eager: bool = False
    """Run the engine without CUDA graphs and compilation. Always so on a CPU. Default false."""

    sleep_level: int = number(1, minimum=0, maximum=2)
    """What the engine gives up between rollouts on a GPU: 0 nothing, 1 (default) weights to host
    and KV cache dropped, 2 both dropped. No effect on a CPU."""

    engine_args: dict[str, Any] = items(dict)
    """Further arguments for vLLM's LLM(), passed on as they are."""
