"""Whether an engine's parameters are where its layout says, so that writing in place is right."""

from collections.abc import Collection, Mapping

from torch import Tensor

from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.boxes import RankLayout


def check_parameters(
    parameters: Mapping[str, Tensor],
    *,
    layout: RankLayout,
    padded: Collection[str] = (),
    engine: str,
) -> None:
    """Raise UserError unless `layout` covers every element of every parameter.

    Only those named in `padded` may hold more: rows beyond the vocabulary, which no one reads.
    An engine that lays weights out anew after loading (packed, quantised or fused ones) would
    otherwise compute with something else than what is written.
    """
    problems = [f"{name} is missing" for name in _names(layout) - parameters.keys()]
    covered = dict.fromkeys(parameters, 0)
    for placement in layout:
        if placement.parameter not in parameters:
            continue
        shape = tuple(parameters[placement.parameter].shape)
        stop = tuple(o + s for o, s in zip(placement.offset, placement.box.shape, strict=True))
        if len(stop) != len(shape) or any(a > b for a, b in zip(stop, shape, strict=True)):
            problems.append(f"{placement.parameter} has shape {shape}, expected at least {stop}")
        covered[placement.parameter] += placement.box.numel
    for name, parameter in parameters.items():
        fits = covered[name] == parameter.numel() or name in padded
        if not fits:
            problems.append(
                f"{name} {tuple(parameter.shape)}: {covered[name]} of its {parameter.numel()} "
                "elements belong to the model"
            )
    if problems:
        raise UserError(
            f"rollout.engine {engine}: the weights are laid out in another way than the actor's "
            "can be written into (quantised, packed or unsupported model); use a plain model, or "
            "rollout.engine=hf:\n" + "\n".join(f"  - {p}" for p in sorted(set(problems)))
        )


def _names(layout: RankLayout) -> set[str]:
    return {placement.parameter for placement in layout}
