"""Which ranks form an engine: the groups with which resharding receives the fewest bytes.

An engine is an ascending list of ranks; the k-th rank holds the k-th tensor-parallel shard.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, combinations

from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.reshard.minimum import Away
from rlhf_megatron.reshard.pieces import Layouts
from rlhf_megatron.reshard.plan import one_node

Engines = list[tuple[int, ...]]

_LARGEST_ENUMERATED_NODE = 8
"""Ranks. 8 ranks have at most 105 groupings of ascending engines; 16 would have millions."""


def propose_engines(
    source: Layouts,
    *,
    shards: Sequence[RankLayout],
    ranks: Sequence[int],
    node_of: Callable[[int], int] = one_node,
    away: Away | None = None,
) -> Engines:
    """Group `ranks` into engines of len(shards) ranks, inside nodes where they fit, else inside
    as few nodes as it takes.

    `source`: the actor's layouts (a rank outside it holds nothing); `shards`: the layout of each
    shard of an engine. All groupings of a node are tried where it has at most 8 ranks, else the
    consecutive and the evenly spaced ones; the first of those with the fewest bytes is taken.
    Raises UserError where the ranks do not fill whole engines.
    """
    size = len(shards)
    if len(ranks) % size:
        raise UserError(
            f"rollout: {len(ranks)} ranks do not fill engines of tensor parallel size {size};"
            " choose a size that divides, or leave ranks out"
        )
    away = away or Away()

    def cost(engines: Engines) -> int:
        return sum(
            away.elements(source.get(rank, ()), wanted=shards[k])
            for engine in engines
            for k, rank in enumerate(engine)
        )

    engines: Engines = []
    for members in engine_blocks(ranks, size=size, node_of=node_of):
        best: Engines = min(_groupings(members, size=size), key=cost)
        engines += best
    return engines


def engine_blocks(
    ranks: Iterable[int], *, size: int, node_of: Callable[[int], int]
) -> list[list[int]]:
    """The ranks that may form engines with each other: those of a node; where they do not fill
    engines of `size` ranks, those of as few consecutive nodes as do; else all."""
    nodes: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        nodes.setdefault(node_of(rank), []).append(rank)
    everyone = [nodes[node] for node in sorted(nodes)]
    for count in range(1, len(everyone) + 1):
        blocks = [
            list(chain.from_iterable(everyone[i : i + count]))
            for i in range(0, len(everyone), count)
        ]
        if all(len(block) % size == 0 for block in blocks):
            return blocks
    return [sorted(ranks)]


def _groupings(members: list[int], *, size: int) -> Iterator[Engines]:
    count = len(members)
    stride = 1
    while stride * size <= count:
        if count % (stride * size) == 0:
            yield _strided(members, size=size, stride=stride)
        stride += 1
    if count <= _LARGEST_ENUMERATED_NODE:
        yield from _all_groupings(members, size=size)


def _strided(members: list[int], *, size: int, stride: int) -> Engines:
    """Blocks of size * stride ranks, each of `stride` engines that take every stride-th rank."""
    block = size * stride
    return [
        tuple(members[start + offset : start + block : stride])
        for start in range(0, len(members), block)
        for offset in range(stride)
    ]


def _all_groupings(members: list[int], *, size: int) -> Iterator[Engines]:
    if not members:
        yield []
        return
    first, *others = members
    for rest in combinations(others, size - 1):
        left = [rank for rank in others if rank not in rest]
        for grouping in _all_groupings(left, size=size):
            yield [(first, *rest), *grouping]
