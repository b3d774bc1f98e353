"""The parameters of one rank, exactly, from the layouts; and what training keeps for each of them.

Gradient buffers and optimizer shards as Megatron-Core lays them out (0.16.1 and 0.19.2:
distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import Placement
from rlhf_megatron.layout.megatron import (
    chunk_prefix,
    megatron_rank_layout,
    padded_vocab_size,
    vocab_parameters,
)
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.tensors import Head
from rlhf_megatron.layout.vllm import VOCAB_PARAMETERS, vllm_rank_layout
from rlhf_megatron.layout.vllm import padded_vocab_size as vllm_padded_vocab_size

PARAMETER_ALIGNMENT = 64
"""Elements at a multiple of which a parameter begins in its buffer."""
BUCKET_ALIGNMENT = 128
"""Elements; a bucket is a multiple of this and of the data-parallel size."""
FP32_BYTES = 4
NUM_MOMENTS = 2

Shapes = Mapping[str, tuple[int, ...]]


def physical_shapes(
    placements: Iterable[Placement], *, padded_names: Iterable[str], padded_rows: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that hold the placements; those of `padded_names` have
    `padded_rows` rows, since padding of the vocabulary belongs to no box."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place in placements:
        reach = tuple(o + n for o, n in zip(place.offset, place.box.shape, strict=True))
        held = shapes.get(place.parameter, reach)
        shapes[place.parameter] = tuple(map(max, held, reach))
    for name in padded_names:
        if name in shapes:
            shapes[name] = (padded_rows, *shapes[name][1:])
    return shapes


@lru_cache(maxsize=256)
def megatron_chunks(
    arch: ModelArchitecture, *, layout: ParallelLayout, stage: int, head: Head
) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Shapes by name of each model chunk of a pipeline stage, in the order of the layers.

    All tensor-parallel ranks of a stage hold parameters of the same shapes.
    """
    tp = layout.tensor_model_parallel_size
    virtual = layout.virtual_pipeline_model_parallel_size
    rows = padded_vocab_size(arch.vocab_size, tensor_model_parallel_size=tp) // tp
    names = set(vocab_parameters(virtual_pipeline_model_parallel_size=virtual))
    if head == "value":
        names = {name for name in names if not name.endswith("output_layer.weight")}
    shapes = physical_shapes(
        megatron_rank_layout(
            arch,
            tensor_model_parallel_size=tp,
            tp_rank=0,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            stage=stage,
            head=head,
            fused_norms=False,
            virtual_pipeline_model_parallel_size=virtual,
        ),
        padded_names=names,
        padded_rows=rows,
    )
    if virtual == 1:
        return (shapes,)
    prefixes = [
        chunk_prefix(number, virtual_pipeline_model_parallel_size=virtual)
        for number in range(virtual)
    ]
    return tuple({n: s for n, s in shapes.items() if n.startswith(prefix)} for prefix in prefixes)


@lru_cache(maxsize=64)
def engine_shapes(
    arch: ModelArchitecture, *, tensor_parallel_size: int
) -> dict[str, tuple[int, ...]]:
    """Shapes by name of the parameters of a rank of a vLLM engine."""
    rows = vllm_padded_vocab_size(arch.vocab_size) // tensor_parallel_size
    return physical_shapes(
        vllm_rank_layout(arch, tensor_parallel_size=tensor_parallel_size, tp_rank=0),
        padded_names=VOCAB_PARAMETERS,
        padded_rows=rows,
    )


@lru_cache(maxsize=64)
def engine_elements(arch: ModelArchitecture, *, tensor_parallel_size: int) -> int:
    """Elements of all parameters of a rank of a vLLM engine."""
    return numel(engine_shapes(arch, tensor_parallel_size=tensor_parallel_size))


def numel(shapes: Shapes) -> int:
    """Elements of all parameters."""
    return sum(prod(shape) for shape in shapes.values())


def largest(shapes: Shapes) -> int:
    """Elements of the largest parameter."""
    return max((prod(shape) for shape in shapes.values()), default=0)


@dataclass(frozen=True, kw_only=True)
class TrainingElements:
    """Elements that a data-parallel rank keeps of one or several buffers."""

    buffer: int
    """Of the buffer that all parameters lie in, and of the one of their gradients: with padding."""
    shard: int
    """Of the parameters' part that this rank's optimizer has."""
    largest_bucket: int


def training_elements(
    chunks: Iterable[Shapes], *, data_parallel_size: int, replica: int
) -> TrainingElements:
    """What DistributedDataParallel and the distributed optimizer allocate, chunk by chunk.

    One bucket a chunk, since gradients are not reduced while others are computed.
    """
    buffer = shard = largest_bucket = 0
    for shapes in chunks:
        ranges, position = [], 0
        for shape in reversed(list(shapes.values())):
            position = _up(position, PARAMETER_ALIGNMENT)
            ranges.append((position, position + prod(shape)))
            position += prod(shape)
        size = _up(position, lcm(data_parallel_size, BUCKET_ALIGNMENT))
        begin = replica * size // data_parallel_size
        end = (replica + 1) * size // data_parallel_size
        shard += sum(max(0, min(stop, end) - max(start, begin)) for start, stop in ranges)
        buffer += size
        largest_bucket = max(largest_bucket, size)
    return TrainingElements(buffer=buffer, shard=shard, largest_bucket=largest_bucket)


def optimizer_bytes_per_element(precision: str) -> int:
    """AdamW's moments, and the master weights where the model's own are bf16."""
    return FP32_BYTES * (NUM_MOMENTS + (precision == "bf16"))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
