"""What a rollout engine takes on one rank: weights, KV cache, graphs and workspace.

vLLM on a GPU (0.25 and 0.32, v1/worker/gpu_worker.py): it may use gpu_memory_utilization of the
GPU, and what weights, a profiled forward pass and its CUDA graphs leave of that is KV cache. What
only a measurement can tell is a named constant here.
"""

from dataclasses import dataclass
from math import ceil

from rlhf_megatron.config import Config
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.sizes import num_parameters
from rlhf_megatron.memory.parameters import engine_elements
from rlhf_megatron.resolve import num_engines
from rlhf_megatron.rollout.kv_cache import cpu_kv_cache_bytes, kv_token_bytes

CUDA_GRAPH_BYTES = 600_000_000
"""Of all captured batch sizes; an estimate."""
ENGINE_CONTEXT_BYTES = 400_000_000
"""Of the engine's communicators and kernels, asleep or not; an estimate."""
LARGE_GPU_BYTES = 70 * 2**30
BATCHED_TOKENS = {"large_gpu": 16384, "other": 8192}
"""vLLM's choice of max_num_batched_tokens for LLM() (engine/arg_utils.py)."""
SAMPLER_ARRAYS = 5
"""[sequences, vocabulary] in float32 at once: logits, log-probs, and what sampling adds."""
GPU_BLOCK_TOKENS = 16
CPU_BLOCK_TOKENS = 32
FP8_CACHE = "fp8"
"""What names of one-byte KV caches begin with."""


@dataclass(frozen=True, kw_only=True)
class KvCapacity:
    """What the KV caches of one engine hold at once."""

    token_bytes: int
    """Of one token on one rank."""
    tokens: int
    sequence_tokens: int
    """Of a sequence of the greatest length: prompt and response."""
    sequences: int
    """Of that length, at most max_num_seqs."""
    max_num_seqs: int
    half_length_sequences: int
    """Of half that length: what is about in the cache on average as responses grow."""


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Bytes of one rank."""

    weights: int
    kv_cache: int
    workspace: int
    cuda_graphs: int
    context: int
    asks_for: int
    """What vLLM wants to find free at its start; 0 where it does not look."""
    capacity: KvCapacity
    problem: str = ""
    """Why it cannot work; empty where it can."""

    @property
    def awake(self) -> int:
        return self.weights + self.kv_cache + self.workspace + self.cuda_graphs + self.context


def engine_memory(
    config: Config,
    *,
    arch: ModelArchitecture,
    world_size: int,
    gpu_memory_bytes: int | None,
) -> EngineMemory:
    """`gpu_memory_bytes`: None on a CPU."""
    if config.rollout.engine == "hf":
        return _transformers_memory(config, arch=arch, world_size=world_size)
    rollout, itemsize = config.rollout, itemsize_of(config.actor.precision)
    size = rollout.tensor_parallel_size
    weights = engine_elements(arch, tensor_parallel_size=size) * itemsize
    token_bytes = kv_token_bytes(
        arch, tensor_parallel_size=size, bytes_per_element=_cache_itemsize(config)
    )
    on_gpu = gpu_memory_bytes is not None
    graphs = CUDA_GRAPH_BYTES if on_gpu and not rollout.enforce_eager else 0
    context = ENGINE_CONTEXT_BYTES if on_gpu else 0
    workspace = _workspace_bytes(config, arch=arch, gpu_memory_bytes=gpu_memory_bytes)
    block = rollout.block_size or (GPU_BLOCK_TOKENS if on_gpu else CPU_BLOCK_TOKENS)
    asks_for = ceil(rollout.gpu_memory_utilization * (gpu_memory_bytes or 0))
    if rollout.kv_cache_memory_gb > 0:
        kv_cache = int(rollout.kv_cache_memory_gb * 1e9)
    elif on_gpu:
        kv_cache = max(0, asks_for - weights - workspace - graphs - context)
    else:
        kv_cache = cpu_kv_cache_bytes(
            arch,
            tensor_parallel_size=size,
            bytes_per_element=itemsize,
            max_model_len=longest_tokens(config),
            max_num_seqs=rollout.max_num_seqs,
            block_tokens=block,
        )
    capacity = _capacity(config, token_bytes=token_bytes, kv_cache=kv_cache, block=block)
    problem = ""
    if capacity.tokens < capacity.sequence_tokens:
        problem = (
            f"the KV cache of {kv_cache / 1e9:.1f} GB holds {capacity.tokens} tokens, less than "
            f"one sequence of {capacity.sequence_tokens}"
        )
    return EngineMemory(
        weights=weights,
        kv_cache=kv_cache,
        workspace=workspace,
        cuda_graphs=graphs,
        context=context,
        asks_for=asks_for,
        capacity=capacity,
        problem=problem,
    )


def longest_tokens(config: Config) -> int:
    """Prompt and response of the longest sequence, evaluation included (vLLM's max_model_len)."""
    response = max(config.rollout.max_response_tokens, config.evaluation.max_response_tokens)
    return config.rollout.max_prompt_tokens + response


def itemsize_of(precision: str) -> int:
    """Bytes of a weight or activation."""
    return 2 if precision == "bf16" else 4


def _cache_itemsize(config: Config) -> int:
    kind = str(config.rollout.engine_args.get("kv_cache_dtype", "auto"))
    return 1 if kind.startswith(FP8_CACHE) else itemsize_of(config.actor.precision)


def _capacity(config: Config, *, token_bytes: int, kv_cache: int, block: int) -> KvCapacity:
    blocks = kv_cache // (token_bytes * block)
    longest = longest_tokens(config)

    def sequences(tokens: int) -> int:
        return int(min(config.rollout.max_num_seqs, blocks // -(-tokens // block)))

    return KvCapacity(
        token_bytes=token_bytes,
        tokens=blocks * block,
        sequence_tokens=longest,
        sequences=sequences(longest),
        max_num_seqs=config.rollout.max_num_seqs,
        half_length_sequences=sequences(-(-longest // 2)),
    )


def _workspace_bytes(
    config: Config, *, arch: ModelArchitecture, gpu_memory_bytes: int | None
) -> int:
    """The peak of a forward pass beside the weights: streams and SwiGLU, or logits and sampling."""
    rollout, itemsize = config.rollout, itemsize_of(config.actor.precision)
    is_large = gpu_memory_bytes is not None and gpu_memory_bytes >= LARGE_GPU_BYTES
    tokens = rollout.max_num_batched_tokens or min(
        BATCHED_TOKENS["large_gpu" if is_large else "other"],
        rollout.max_num_seqs * longest_tokens(config),
    )
    ffn = arch.ffn_hidden_size // rollout.tensor_parallel_size
    layer = tokens * itemsize * (3 * arch.hidden_size + 3 * ffn)
    sampler = SAMPLER_ARRAYS * rollout.max_num_seqs * arch.vocab_size * 4
    return max(layer, sampler)


def _transformers_memory(
    config: Config, *, arch: ModelArchitecture, world_size: int
) -> EngineMemory:
    """transformers' generate: the whole model on each rank, and keys and values of its share of the
    step at full length."""
    itemsize = itemsize_of(config.actor.precision)
    token_bytes = kv_token_bytes(arch, tensor_parallel_size=1, bytes_per_element=itemsize)
    samples = config.rollout.prompts_per_step * config.rollout.responses_per_prompt
    share = -(-samples // num_engines(config, world_size=world_size))
    share = min(share, config.rollout.max_num_seqs)
    longest = longest_tokens(config)
    return EngineMemory(
        weights=num_parameters(arch, head="lm") * itemsize,
        kv_cache=share * longest * token_bytes,
        workspace=SAMPLER_ARRAYS * share * arch.vocab_size * 4,
        cuda_graphs=0,
        context=0,
        asks_for=0,
        capacity=KvCapacity(
            token_bytes=token_bytes,
            tokens=share * longest,
            sequence_tokens=longest,
            sequences=share,
            max_num_seqs=config.rollout.max_num_seqs,
            half_length_sequences=share,
        ),
    )
