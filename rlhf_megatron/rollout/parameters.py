"""Whether an engine's parameters are where its layout says, so that writing in place is right."""

from collections.abc import Collection, Mapping
from itertools import combinations

import torch
from torch import Tensor

from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.boxes import Box, Placement, RankLayout

PROBLEMS_SHOWN = 20


def layout_problems(
    parameters: Mapping[str, Tensor],
    *,
    layout: RankLayout,
    dtype: torch.dtype,
    padded: Collection[str] = (),
) -> list[str]:
    """Why writing `layout` does not fill the parameters; empty if each element is written once.

    Only those named in `padded` may hold more: rows beyond the vocabulary, which no one reads. An
    engine that lays weights out anew after loading (packed, quantised or fused ones) would
    otherwise compute with something else than what is written.
    """
    placed: dict[str, list[Placement]] = {}
    for placement in layout:
        placed.setdefault(placement.parameter, []).append(placement)
    problems = [f"{name} is missing" for name in placed.keys() - parameters.keys()]
    for name, parameter in parameters.items():
        problems += _parameter_problems(
            name, parameter, placements=placed.get(name, []), dtype=dtype, may_exceed=name in padded
        )
    return sorted(problems)


def _parameter_problems(
    name: str,
    parameter: Tensor,
    *,
    placements: list[Placement],
    dtype: torch.dtype,
    may_exceed: bool,
) -> list[str]:
    shape = tuple(parameter.shape)
    if parameter.dtype != dtype:
        return [f"{name} is {parameter.dtype}, expected {dtype}"]
    problems = []
    regions = [_region(placement) for placement in placements]
    for region in regions:
        if len(region.stop) != len(shape) or any(
            a > b for a, b in zip(region.stop, shape, strict=True)
        ):
            problems.append(f"{name} has shape {shape}, expected at least {region.stop}")
    if problems:
        return problems
    if any(a.intersect(b) for a, b in combinations(regions, 2)):
        problems.append(f"{name} {shape}: two parts of it overlap")
    covered = sum(region.numel for region in regions)
    if covered != parameter.numel() and not may_exceed:
        problems.append(
            f"{name} {shape}: {covered} of its {parameter.numel()} elements belong to the model"
        )
    return problems


def _region(placement: Placement) -> Box:
    """Where in its parameter the placement lies."""
    start = placement.offset
    stop = tuple(o + s for o, s in zip(start, placement.box.shape, strict=True))
    return Box(start, stop)


def check_parameters(
    parameters: Mapping[str, Tensor], *, layout: RankLayout, dtype: torch.dtype, engine: str
) -> None:
    """Raise UserError, naming them all, where there are `layout_problems`."""
    problems = layout_problems(parameters, layout=layout, dtype=dtype)
    if problems:
        raise UserError(
            f"rollout.engine {engine}: the weights are laid out in another way than the actor's "
            "can be written into (quantised, packed or unsupported model); use a plain model:\n"
            + listed(problems)
        )


def listed(problems: list[str]) -> str:
    """One a line; of many, the first."""
    shown = [f"  - {problem}" for problem in problems[:PROBLEMS_SHOWN]]
    more = len(problems) - len(shown)
    return "\n".join([*shown, *([f"  - and {more} more"] if more else [])])
