"""The transfer buffers of a weight sync, from the reshard plan."""

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.hf import hf_layout
from rlhf_megatron.layout.megatron import megatron_layouts
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.vllm import vllm_rank_layout
from rlhf_megatron.memory.parameters import Shapes, physical_shapes
from rlhf_megatron.reshard.engines import propose_engines
from rlhf_megatron.reshard.messages import direct_bytes, make_exchange, packed_numel
from rlhf_megatron.reshard.minimum import Away
from rlhf_megatron.reshard.plan import BUCKETS_IN_FLIGHT, RankPlan, make_plan

MOST_RANKS_PLANNED = 8
"""Above it the buffers are taken as full: a plan of hundreds of ranks takes a minute or two."""

Engines = tuple[tuple[int, ...], ...]


@lru_cache(maxsize=16)
def transfer_buffers(
    arch: ModelArchitecture,
    *,
    actor: ParallelLayout,
    ranks: tuple[int, ...],
    engine_size: int,
    engines: Engines | None,
    whole_models: bool,
    itemsize: int,
    bucket_bytes: int,
    gpus_per_node: int,
    listed: tuple[int, ...],
    on_gpu: bool,
) -> dict[int, int]:
    """Bytes of the buffers of each of the `listed` ranks, as reshard.execute.Resharder makes them.

    At most BUCKETS_IN_FLIGHT buckets to send from and as many to receive in; with more than
    MOST_RANKS_PLANNED ranks exactly that.

    `ranks`: those that roll out. `engines`: as configured, or None for the ones with which the
    fewest bytes move. `whole_models`: engines of transformers, each rank with all weights.
    """

    if len(actor.ranks) > MOST_RANKS_PLANNED:
        return dict.fromkeys(listed, 2 * bucket_bytes)

    def node_of(rank: int) -> int:
        return rank // gpus_per_node

    source = megatron_layouts(arch, parallel=actor, head="lm", fused_norms=False)
    if whole_models:
        shards = [hf_layout(arch, head="lm")]
    else:
        shards = [
            vllm_rank_layout(arch, tensor_parallel_size=engine_size, tp_rank=shard)
            for shard in range(engine_size)
        ]
    away = Away()
    chosen: Sequence[tuple[int, ...]] = engines or propose_engines(
        source, shards=shards, ranks=ranks, node_of=node_of, away=away
    )
    target = {rank: shards[k] for engine in chosen for k, rank in enumerate(engine)}
    plan = make_plan(
        source,
        target,
        itemsize_bytes=itemsize,
        bucket_bytes=bucket_bytes // BUCKETS_IN_FLIGHT,
        node_of=node_of,
        ranks=listed,
        away=away,
    )
    in_flight = min(BUCKETS_IN_FLIGHT, plan.num_buckets)
    return {
        rank: in_flight
        * itemsize
        * _packed_numel(
            mine,
            source=_shapes(source.get(rank, ())),
            target=_shapes(target.get(rank, ())),
            direct_numel=direct_bytes(on_gpu=on_gpu) // itemsize,
        )
        for rank, mine in plan.by_rank.items()
    }


def _shapes(layout: RankLayout) -> Shapes:
    return physical_shapes(layout, padded_names=(), padded_rows=0)


def _packed_numel(plan: RankPlan, *, source: Shapes, target: Shapes, direct_numel: int) -> int:
    """Elements that are packed in the largest bucket that is sent and in the largest received."""
    exchanges = [
        make_exchange(
            sends, receives=receives, position=lambda rank: rank, direct_numel=direct_numel
        )
        for sends, receives in zip(plan.sends, plan.receives, strict=True)
    ]
    sent = (packed_numel(e.sends, view_of=attrgetter("source"), shapes=source) for e in exchanges)
    received = (
        packed_numel(e.receives, view_of=attrgetter("target"), shapes=target) for e in exchanges
    )
    return max(sent, default=0) + max(received, default=0)
