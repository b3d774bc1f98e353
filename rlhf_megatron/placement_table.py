"""Which ranks hold which roles, as a table for people."""

from collections.abc import Sequence

from rlhf_megatron.config import Config
from rlhf_megatron.placement_config import ROLES
from rlhf_megatron.resolve import num_engines, parallel_layout
from rlhf_megatron.role_ranks import role_placement


def placement_lines(config: Config, *, world_size: int) -> list[str]:
    """One line for each set of ranks with the same roles, in the order of the ranks:
    "ranks 0-3: actor TP2 PP2 DP1, rollout 2 x TP2"."""
    placement = role_placement(config, world_size=world_size)
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in range(world_size):
        roles = tuple(role for role in ROLES if rank in placement.ranks.get(role, ()))
        alike.setdefault(roles, []).append(rank)
    texts = {
        role: f"{role} {_layout(config, role=role, world_size=world_size)}"
        for role in placement.ranks
    }
    names = [_ranks_in_words(ranks) for ranks in alike.values()]
    width = max(len(name) for name in names)
    lines = [
        f"  {name + ':':<{width + 1}} {', '.join(texts[role] for role in roles) or 'nothing'}"
        for name, roles in zip(names, alike, strict=True)
    ]
    if config.pipeline.depth:
        if placement.share_ranks("critic", "rollout"):
            text = (
                "only rewards run beside the updates: some ranks both roll out and have the critic"
            )
        else:
            text = "the critic is updated while the next batch rolls out"
        lines.append(f"  pipeline.depth=1: {text}")
    return lines


def _layout(config: Config, *, role: str, world_size: int) -> str:
    if role == "rollout":
        engines = num_engines(config, world_size=world_size)
        return f"{engines} x TP{config.rollout.tensor_parallel_size}"
    layout = parallel_layout(getattr(config, role).parallel, world_size=world_size)
    if role == "reward":
        return f"x {layout.data_parallel_size}"
    return (
        f"TP{layout.tensor_model_parallel_size} PP{layout.pipeline_model_parallel_size} "
        f"DP{layout.data_parallel_size}"
    )


def _ranks_in_words(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0-3, 6"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
