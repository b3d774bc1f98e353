"""The state of every random generator of a rank: Python, NumPy, torch, CUDA, and the
tensor-parallel tracker of each role."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from rlhf_megatron.distributed.groups import RoleGroups
from rlhf_megatron.errors import UserError


def rng_state(roles: Mapping[str, RoleGroups], *, device: torch.device) -> dict[str, Any]:
    """A copy, for torch.save; loads with weights_only."""
    version, internal, gauss = random.getstate()
    numpy_name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [
            str(numpy_name),
            np.asarray(keys).tolist(),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "trackers": {name: _tracker_state(groups) for name, groups in roles.items()},
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(
    state: Mapping[str, Any], *, roles: Mapping[str, RoleGroups], device: torch.device
) -> None:
    """Go on where `state` was taken; trackers of roles that it does not know stay."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    for role, groups in roles.items():
        if role in state["trackers"]:
            with groups.active():
                get_cuda_rng_tracker().set_states(dict(state["trackers"][role]))


def read_rng_state(path: Path) -> dict[str, Any]:
    """Raises UserError where the file does not hold one."""
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise UserError(f"{path}: not readable: {error}") from None
    return found


def _tracker_state(groups: RoleGroups) -> dict[str, torch.Tensor]:
    with groups.active():
        return {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
