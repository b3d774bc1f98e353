"""Options of parallel layouts and of the distributed start."""

from dataclasses import dataclass

from rlhf_megatron.schema import choice, number


@dataclass(kw_only=True)
class ParallelConfig:
    """How one role's model is spread over its ranks. Names are those of Megatron-Core."""

    tensor_model_parallel_size: int = number(1, minimum=1)
    """Ranks that share each layer's matrices. Must divide the attention heads and the feed-forward
    width; key-value heads must be a multiple of it or divide it. Default 1."""

    pipeline_model_parallel_size: int = number(1, minimum=1)
    """Pipeline stages. Must divide the number of layers. Default 1."""

    virtual_pipeline_model_parallel_size: int = number(1, minimum=1)
    """Model chunks per pipeline stage: the interleaved schedule, with smaller bubbles and more
    messages. Above 1 needs pipeline_model_parallel_size > 1, and layers that the product of the
    two divides; samples are packed into a multiple of the stages of micro-batches, which are
    padded to one length. Default 1."""

    context_parallel_size: int = number(1, minimum=1)
    """Ranks that share one sequence. Only 1 is supported so far; more is refused by name."""

    expert_model_parallel_size: int = number(1, minimum=1)
    """Ranks that share the experts of a layer. Only 1 is supported so far."""

    data_parallel_size: int = number(0, minimum=0)
    """Model replicas. 0 (the default) takes what the ranks allow: ranks / (tensor x pipeline). Any
    other value must give exactly the number of ranks."""

    sequence_parallel: bool = False
    """Shard the activations between tensor-parallel regions along the sequence. Needs
    tensor_model_parallel_size > 1, and is refused with 1. Default false."""

    ranks: str = "all"
    """The global ranks of the role, ascending: "all", or a list such as "0-3,6". Default all."""

    grid_order: str = "tp-dp-pp"
    """Order of the dimensions over the ranks, fastest first: a permutation of tp, dp, pp. The
    default is Megatron's. It decides what resharding to the rollout engines costs."""


@dataclass(kw_only=True)
class DistributedConfig:
    """Process groups, device and backend."""

    device: str = choice("auto", "cpu", "cuda")
    """Where tensors live. "auto" (the default) takes CUDA where there is a GPU, else the CPU."""

    timeout_seconds: float = number(1800.0, minimum=0, exclusive=True)
    """How long a collective may wait for its peers before the job ends with an error. Seconds,
    default 1800."""

    join_timeout_seconds: float = number(600.0, minimum=0, exclusive=True)
    """How long the ranks that have started wait for the others before the job ends with the names
    of those that are missing. Seconds, default 600."""
