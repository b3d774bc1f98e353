"""Sizes of KV caches, from an architecture alone. Imports no torch."""

from rlhf_megatron.layout.architecture import ModelArchitecture

CPU_KV_CACHE_BYTES_MAX = 10**9
"""Bound of the KV cache that is chosen for a CPU; more sequences than fit wait their turn."""


def kv_token_bytes(
    architecture: ModelArchitecture, *, tensor_parallel_size: int, bytes_per_element: int
) -> int:
    """Keys and values of one token in all layers, on one rank: a KV head is never cut."""
    kv_heads = max(1, architecture.num_key_value_heads // tensor_parallel_size)
    return 2 * architecture.num_layers * kv_heads * architecture.head_dim * bytes_per_element


def cpu_kv_cache_bytes(
    architecture: ModelArchitecture,
    *,
    tensor_parallel_size: int,
    bytes_per_element: int,
    max_model_len: int,
    max_num_seqs: int,
    block_tokens: int,
) -> int:
    """KV cache of one rank in bytes: `max_num_seqs` sequences of `max_model_len` tokens.

    At most CPU_KV_CACHE_BYTES_MAX, and at least one full sequence. One block more than that, since
    vLLM keeps one for itself.
    """
    block_bytes = block_tokens * kv_token_bytes(
        architecture,
        tensor_parallel_size=tensor_parallel_size,
        bytes_per_element=bytes_per_element,
    )
    sequence_blocks = -(-max_model_len // block_tokens)
    wanted = max_num_seqs * sequence_blocks * block_bytes
    bounded = min(wanted, CPU_KV_CACHE_BYTES_MAX // block_bytes * block_bytes)
    return max(bounded, sequence_blocks * block_bytes) + block_bytes
