"""What Megatron-Core's distributed optimizer holds, parameter by parameter (0.16.1 and 0.19.2).

Each data-parallel rank holds a range of each parameter, flattened: in float32 the master weights
and Adam's two moments. Megatron-Core's own reshardable state dict needs an Adam that counts its
steps in the group, as the fused ones do: with torch's it cannot be loaded (distrib_optimizer.py:940
of 0.16.1, KeyError 'step'), nor saved before the first step. So the ranges are read and written
here, through the public attributes of DistributedOptimizer, for either kind.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "param"
"""State names, as in the keys of Megatron-Core's fully reshardable format."""


def state_names(parameter: Tensor) -> tuple[str, ...]:
    """What is stored of a parameter. A float32 parameter is its own master copy."""
    return MOMENTS if parameter.dtype == torch.float32 else (MASTER, *MOMENTS)


@dataclass(frozen=True)
class OwnRange:
    """This rank's range [start, stop) of a flattened parameter, and its state."""

    start: int
    stop: int
    main: Tensor
    """Float32 master weights of the range, [stop - start]."""
    adam: Any
    """The inner optimizer."""

    def get(self, name: str) -> Tensor | None:
        """Master weights or a moment of the range; None for a moment before the first step."""
        if name == MASTER:
            return self.main
        found: Tensor | None = self.adam.state.get(self.main, {}).get(name)
        return found

    @torch.no_grad()
    def set(self, name: str, *, values: Tensor) -> None:
        """Overwrite master weights or a moment; moments are made if there are none."""
        target = self.get(name)
        if target is None:
            target = torch.empty_like(self.main)
            self.adam.state[self.main][name] = target
        target.copy_(values)


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def own_ranges(optimizer: Any) -> dict[Tensor, OwnRange]:
    """This rank's ranges by model parameter; a parameter without one lies on other replicas."""
    return {parameter: own for part in _parts(optimizer) for parameter, own in _ranges(part)}


def _ranges(part: Any) -> Iterator[tuple[Tensor, OwnRange]]:
    for parameter, (buffer, dtype, bucket) in part.model_param_gbuf_map.items():
        lies = part.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
        group, order = part.model_param_group_index_map[parameter]
        main = part.optimizer.param_groups[group]["params"][order]
        yield parameter, OwnRange(lies.start, lies.end, main, part.optimizer)


def adam_steps(optimizer: Any) -> int:
    """How often the optimizer has stepped. It is the same for all parameters."""
    counts = set()
    for part in _parts(optimizer):
        states = [state for state in part.optimizer.state.values() if "step" in state]
        counts |= {int(state["step"]) for state in states}
        counts |= {int(group["step"]) for group in part.optimizer.param_groups if "step" in group}
    assert len(counts) <= 1, f"parameters were stepped differently often: {sorted(counts)}"
    return counts.pop() if counts else 0


def set_adam_steps(optimizer: Any, *, steps: int) -> None:
    """Set the count, once the moments are there; of torch's AdamW in each parameter's state, of
    the fused ones in each group."""
    for part in _parts(optimizer):
        adam = part.optimizer
        if isinstance(adam, torch.optim.Optimizer) and type(adam).__module__.startswith("torch."):
            for group in adam.param_groups:
                for parameter in group["params"]:
                    if parameter in adam.state:
                        # The fused kernel reads the count on the device, the others on the host.
                        device = parameter.device if group["fused"] else "cpu"
                        adam.state[parameter]["step"] = torch.tensor(float(steps), device=device)
        else:
            for group in adam.param_groups:
                group["step"] = steps
