"""Which ranks form which rollout engine, and what each of them holds."""

from collections.abc import Callable
from dataclasses import dataclass

from rlhf_megatron.config import Config
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.hf import hf_layout
from rlhf_megatron.layout.vllm import vllm_rank_layout
from rlhf_megatron.reshard.engines import propose_engines
from rlhf_megatron.reshard.pieces import Layouts
from rlhf_megatron.resolve import rollout_ranks
from rlhf_megatron.rollout.engine_ranks import check_engine_size, parse_engines


@dataclass(frozen=True, kw_only=True)
class RolloutPlacement:
    """The engines as rank lists, and the layout of each of their ranks."""

    engine_name: str  # "vllm" or "hf"
    engines: list[tuple[int, ...]]
    layouts: dict[int, RankLayout]


def place_engines(
    config: Config,
    *,
    arch: ModelArchitecture,
    source: Layouts,
    engine_name: str,
    world_size: int,
    node_of: Callable[[int], int],
) -> RolloutPlacement:
    """Group the rollout ranks as `rollout.engines` says, or so that the fewest bytes move.

    `source`: the actor's layouts. Raises UserError where the ranks do not fit.
    """
    size = config.rollout.tensor_parallel_size
    check_engine_size(engine_name, tensor_parallel_size=size)
    if engine_name == "hf":
        shards = [hf_layout(arch, head="lm")]
    else:
        shards = [
            vllm_rank_layout(arch, tensor_parallel_size=size, tp_rank=shard)
            for shard in range(size)
        ]
    ranks = rollout_ranks(config, world_size=world_size)
    if config.rollout.engines == "auto":
        engines = propose_engines(source, shards=shards, ranks=ranks, node_of=node_of)
    else:
        engines = parse_engines(config.rollout.engines, ranks=ranks, tensor_parallel_size=size)
    layouts = {rank: shards[k] for engine in engines for k, rank in enumerate(engine)}
    return RolloutPlacement(engine_name=engine_name, engines=engines, layouts=layouts)
