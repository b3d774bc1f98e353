"""Rotary frequencies (arXiv:2104.09864) and their scalings, as transformers 5 computes them
(modeling_rope_utils.py) for the same config.

Megatron-Core's own scalings fix what the config leaves free: bounds of 1, 4 and 8192 in Llama 3's.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.layout.architecture import ModelArchitecture


@dataclass(frozen=True)
class Rope:
    """The rotation of queries and keys."""

    frequencies: Tensor
    """[head_dim / 2] in float32, on the CPU: radians per position."""
    attention_factor: float = 1.0
    """What YaRN multiplies queries and keys by, each; scores grow by its square."""


def rope(arch: ModelArchitecture) -> Rope:
    """The rotation of an architecture."""
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
    periods = arch.rope_theta**exponents
    scaling = arch.rope_scaling or {"rope_type": "default"}
    match scaling["rope_type"]:
        case "default":
            return Rope(1.0 / periods)
        case "linear":
            return Rope(1.0 / periods / float(scaling["factor"]))
        case "llama3":
            return Rope(_llama3(1.0 / periods, scaling=scaling))
        case "yarn":
            frequencies = _yarn(periods, theta=arch.rope_theta, scaling=scaling)
            return Rope(frequencies, _yarn_attention_factor(scaling))
    raise AssertionError(scaling)


def _llama3(frequencies: Tensor, *, scaling: dict[str, Any]) -> Tensor:
    """Long waves slowed down by the factor, short ones kept, those between blended."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    context = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    smooth = (context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / factor, frequencies)
    between = (wavelengths <= context / low) & (wavelengths >= context / high)
    return torch.where(between, blended, scaled)


def _yarn(periods: Tensor, *, theta: float, scaling: dict[str, Any]) -> Tensor:
    """YaRN (arXiv:2309.00071, section 3.2): a linear ramp over the dimensions, from kept to slowed
    down, between those that turn `beta_fast` and `beta_slow` times within the original context."""
    half = len(periods)
    context = float(scaling["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return half * math.log(context / (turns * 2 * math.pi)) / math.log(theta)

    first = dimension(float(scaling.get("beta_fast", 32)))
    last = dimension(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first if last != first else 0.001
    ramp = ((torch.arange(half, dtype=torch.float32) - first) / width).clamp(0, 1)
    return ramp / (float(scaling["factor"]) * periods) + (1 - ramp) / periods


def _yarn_attention_factor(scaling: dict[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    factor = float(scaling["factor"])
    if mscale and all_dim:
        return _concentration(factor, float(mscale)) / _concentration(factor, float(all_dim))
    return _concentration(factor, 1.0)


def _concentration(factor: float, mscale: float) -> float:
    """Equation 22 of the paper, with `mscale` in front of the logarithm."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
