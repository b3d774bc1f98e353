"""What a weight sync would move, for one pair of layouts: the figures of tools/plan_reshard.py."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from math import prod

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.megatron import megatron_layouts
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.tensors import logical_tensors
from rlhf_megatron.layout.vllm import vllm_rank_layout
from rlhf_megatron.reshard.engines import Engines, engine_blocks, propose_engines
from rlhf_megatron.reshard.minimum import Away, elements_minimum_over_numberings
from rlhf_megatron.reshard.plan import BUCKETS_IN_FLIGHT, ReshardPlan, make_plan


@dataclass(frozen=True, kw_only=True)
class OrderProposal:
    """An order of the training grid, fastest dimension first, with which fewer bytes move."""

    order: tuple[str, ...]
    bytes_minimum_total: int


@dataclass(frozen=True, kw_only=True)
class ReshardDescription:
    """One sync. Totals are over all rollout ranks."""

    plan: ReshardPlan
    """With the transfers of `first_rank` alone, or of all ranks."""
    plan_seconds: float
    """Time of this process to lay the model out on both sides and to plan."""
    first_rank: int
    engines: Engines
    bytes_minimum_total: int
    """Over the engines that the grid order allows: ascending lists of ranks, inside a node where
    they fit."""
    bytes_minimum_in_nodes: int | None
    """Over every way to deal the shards out inside the nodes, ascending or not: another grid order
    may reach it. None where it is too much to compute."""
    bytes_minimum_unconstrained: int | None
    """The same without regard to nodes."""
    full_gather_bytes_per_rank: int
    """What a rank receives, on average, that gathers the whole model."""
    proposal: OrderProposal | None


def describe_reshard(
    arch: ModelArchitecture,
    *,
    train: ParallelLayout,
    rollout_tensor_parallel_size: int,
    itemsize_bytes: int,
    bucket_bytes: int,
    gpus_per_node: int,
    all_ranks: bool = False,
) -> ReshardDescription:
    """Plan a sync from `train` to engines on the same ranks. Raises UserError where these do not
    fill whole engines; the layouts must suit the model."""

    def node_of(rank: int) -> int:
        return rank // gpus_per_node

    size, ranks = rollout_tensor_parallel_size, train.ranks
    start = time.process_time()
    source = megatron_layouts(arch, parallel=train, head="lm", fused_norms=False)
    shards = [vllm_rank_layout(arch, tensor_parallel_size=size, tp_rank=k) for k in range(size)]
    away = Away()
    engines = propose_engines(source, shards=shards, ranks=ranks, node_of=node_of, away=away)
    target = {rank: shards[k] for engine in engines for k, rank in enumerate(engine)}
    plan = make_plan(
        source,
        target,
        itemsize_bytes=itemsize_bytes,
        bucket_bytes=bucket_bytes // BUCKETS_IN_FLIGHT,
        node_of=node_of,
        ranks=None if all_ranks else ranks[:1],
        away=away,
    )
    seconds = time.process_time() - start

    block_of = {
        rank: number
        for number, block in enumerate(engine_blocks(ranks, size=size, node_of=node_of))
        for rank in block
    }

    def over_numberings(where: Callable[[int], int]) -> int | None:
        elements = elements_minimum_over_numberings(
            source, shards=shards, ranks=ranks, node_of=where, away=away
        )
        return None if elements is None else elements * itemsize_bytes

    minimum = itemsize_bytes * _elements_away(source, target=target, away=away)
    return ReshardDescription(
        plan=plan,
        plan_seconds=seconds,
        first_rank=ranks[0],
        engines=engines,
        bytes_minimum_total=minimum,
        bytes_minimum_in_nodes=over_numberings(block_of.__getitem__),
        bytes_minimum_unconstrained=over_numberings(lambda rank: 0),
        full_gather_bytes_per_rank=_full_gather_bytes(
            arch, source=source, itemsize_bytes=itemsize_bytes
        ),
        proposal=_better_order(
            train,
            source=source,
            shards=shards,
            gpus_per_node=gpus_per_node,
            away=away,
            itemsize_bytes=itemsize_bytes,
            below_bytes=minimum,
        ),
    )


def _elements_away(
    source: Mapping[int, RankLayout], *, target: Mapping[int, RankLayout], away: Away
) -> int:
    return sum(away.elements(source[rank], wanted=wanted) for rank, wanted in target.items())


def _full_gather_bytes(
    arch: ModelArchitecture, *, source: Mapping[int, RankLayout], itemsize_bytes: int
) -> int:
    """Mean over the ranks of the model less what they hold."""
    whole = sum(prod(tensor.shape) for tensor in logical_tensors(arch, head="lm"))
    sizes: dict[int, int] = {}
    for layout in source.values():
        if id(layout) not in sizes:
            once = {(placement.tensor, placement.box) for placement in layout}
            sizes[id(layout)] = sum(box.numel for _, box in once)
    held = sum(sizes[id(layout)] for layout in source.values())
    return itemsize_bytes * (whole - held // len(source))


def _better_order(
    train: ParallelLayout,
    *,
    source: Mapping[int, RankLayout],
    shards: list[RankLayout],
    gpus_per_node: int,
    away: Away,
    itemsize_bytes: int,
    below_bytes: int,
) -> OrderProposal | None:
    """The order with the fewest bytes, if fewer than `below_bytes`, of those that do not spread a
    tensor-parallel group over more nodes than a node's ranks, or `train`, make necessary."""
    spread = max(gpus_per_node, _tensor_parallel_span(train))
    best = None
    for order in permutations(("pp", "tp", "dp")):
        other = replace(train, order=order)
        if order == train.order or _tensor_parallel_span(other) > spread:
            continue
        numbered = {}
        for rank in train.ranks:
            at = other.coordinates(rank)
            numbered[rank] = source[train.rank(tp=at.tp, dp=at.dp, pp=at.pp)]
        engines = propose_engines(
            numbered,
            shards=shards,
            ranks=train.ranks,
            node_of=lambda rank: rank // gpus_per_node,
            away=away,
        )
        target = {rank: shards[k] for engine in engines for k, rank in enumerate(engine)}
        found = itemsize_bytes * _elements_away(numbered, target=target, away=away)
        if found < below_bytes:
            best, below_bytes = OrderProposal(order=order, bytes_minimum_total=found), found
    return best


def _tensor_parallel_span(layout: ParallelLayout) -> int:
    """From the first to the last rank of a tensor-parallel group, both included, rounded up to the
    repeat of the pattern."""
    span = 1
    for dimension in layout.order:
        span *= layout.size(dimension)
        if dimension == "tp":
            break
    return span
