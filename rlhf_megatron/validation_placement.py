"""The rules of a configuration about which roles lie on which ranks, and of its pipeline."""

from collections.abc import Iterator

from rlhf_megatron.config import Config
from rlhf_megatron.layout.parallel import parse_ranks
from rlhf_megatron.loader import show
from rlhf_megatron.placement_config import placed_by


def placement_problems(config: Config, *, world_size: int) -> Iterator[str]:
    """Of `placement` and `pipeline`. What is wrong with a role's ranks that `placement` names is
    said here, once for all roles of an entry."""
    for index in sorted(set(placed_by(config).values())):
        text = str(config.placement[index].get("ranks", "")).strip()
        problem = ranks_problem(text, key=f"placement[{index}].ranks", world_size=world_size)
        if problem:
            yield problem
    yield from _pipeline(config)


def ranks_problem(text: str, *, key: str, world_size: int) -> str:
    """What is wrong with a list of ranks; "" for a good one."""
    try:
        ranks = parse_ranks(text, default=range(world_size))
    except ValueError:
        return f"{key}={text}: must be all or an ascending list of ranks; write it like 0-3,6"
    if ranks and ranks[-1] >= world_size:
        return (
            f"{key}={text}: rank {ranks[-1]} is outside the world of {world_size} ranks; take "
            f"ranks from 0 to {world_size - 1}, or start {ranks[-1] + 1} processes"
        )
    return ""


def _pipeline(config: Config) -> Iterator[str]:
    if config.pipeline.depth == 0:
        return
    if config.ppo.importance_sampling.cap == 0:
        yield (
            f"pipeline.depth={config.pipeline.depth}: samples are a step older than the actor, and "
            f"ppo.importance_sampling.cap={show(config.ppo.importance_sampling.cap)} corrects "
            "nothing; set ppo.importance_sampling.cap=2, or pipeline.depth=0"
        )
    if config.reshard.interval > 1:
        yield (
            f"pipeline.depth={config.pipeline.depth}: with reshard.interval="
            f"{config.reshard.interval} samples would be older than one step; set "
            "reshard.interval=1, or pipeline.depth=0"
        )
