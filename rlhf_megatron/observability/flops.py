"""Model FLOPs of a transformer, and the peak rate of a device, for train/mfu.

Counted is the arithmetic that the model needs: matrix products and causal attention. Recomputed
activations, the optimizer, norms and the embedding look-up are not.
"""

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

_MULTIPLY_ADD = 2


@dataclass(frozen=True, kw_only=True)
class ArchitectureNumbers:
    """The sizes that decide a dense decoder's arithmetic."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """KV heads."""
    head_dim: int
    output_size: int
    """Rows of the head: the vocabulary, or 1 for a critic."""
    gated_mlp: bool = True
    """Gate, up and down projections (Llama, Qwen2), or up and down only."""


class Architecture(Protocol):
    """What is read of a ModelArchitecture (layout/), which nothing here imports."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def numbers_of(arch: Architecture, *, output_size: int) -> ArchitectureNumbers:
    """Of a model with a head of `output_size` outputs."""
    return ArchitectureNumbers(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_hidden_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_key_value_heads,
        head_dim=arch.head_dim,
        output_size=output_size,
    )


def matmul_parameters(architecture: ArchitectureNumbers) -> int:
    """Parameters that take part in a matrix product for each token, the head included."""
    a = architecture
    query_and_output = 2 * a.hidden_size * a.num_attention_heads * a.head_dim
    key_and_value = 2 * a.hidden_size * a.num_query_groups * a.head_dim
    mlp = (3 if a.gated_mlp else 2) * a.hidden_size * a.ffn_hidden_size
    return a.num_layers * (query_and_output + key_and_value + mlp) + a.hidden_size * a.output_size


def sequence_flops(
    architecture: ArchitectureNumbers, *, sequence_lengths: Iterable[int]
) -> list[int]:
    """FLOPs of one forward pass over each of the sequences (tokens, prompts included).

    2 per matrix parameter and token, and in each layer 2 * s^2 * heads * head_dim for a sequence of
    s tokens: scores and weighted sum at 2 * s^2 each, halved by the causal mask.
    """
    a = architecture
    dense = _MULTIPLY_ADD * matmul_parameters(a)
    attention = _MULTIPLY_ADD * a.num_layers * a.num_attention_heads * a.head_dim
    return [(dense + attention * length) * length for length in sequence_lengths]


def forward_flops(architecture: ArchitectureNumbers, *, sequence_lengths: Iterable[int]) -> int:
    """FLOPs of one forward pass over all the sequences (`sequence_flops`)."""
    return sum(sequence_flops(architecture, sequence_lengths=sequence_lengths))


def training_flops(architecture: ArchitectureNumbers, *, sequence_lengths: Iterable[int]) -> int:
    """FLOPs of one forward and backward pass: three times the forward pass."""
    return 3 * forward_flops(architecture, sequence_lengths=sequence_lengths)


def model_flops_utilization(
    flops: float, *, seconds: float, num_devices: int, peak_tflops: float
) -> float:
    """Share of the devices' peak that `flops`, done by all of them together, came to."""
    available = seconds * num_devices * peak_tflops * 1e12
    return flops / available if available > 0 else 0.0


_PEAK_TFLOPS: tuple[tuple[tuple[str, ...], float, float], ...] = (
    # Words of the device's name; dense tensor-core bfloat16; float32 without TF32. Data sheets.
    # The first row whose words all occur is taken.
    (("GB200",), 2500.0, 80.0),
    (("B200",), 2250.0, 75.0),
    (("GH200",), 989.4, 66.9),
    (("H200", "NVL"), 835.5, 60.0),
    (("H200",), 989.4, 66.9),
    (("H100", "PCIe"), 756.5, 51.2),
    (("H100", "NVL"), 835.5, 60.0),
    (("H100",), 989.4, 66.9),
    (("H800", "PCIe"), 756.5, 51.2),
    (("H800",), 989.4, 66.9),
    (("H20",), 148.0, 44.0),
    (("A100",), 312.0, 19.5),
    (("A800",), 312.0, 19.5),
    (("L40S",), 362.1, 91.6),
    (("L40",), 181.0, 90.5),
    (("L4",), 121.0, 30.3),
    (("A40",), 149.7, 37.4),
    (("A10",), 125.0, 31.2),
    (("4090",), 165.2, 82.6),
)


def known_peak_tflops(device_name: str, *, dtype: torch.dtype) -> float | None:
    """Dense peak of a GPU by its name as CUDA gives it; None where it is not in the table."""
    words = set(re.split(r"[\s\-]+", device_name))
    for needed, bfloat16, float32 in _PEAK_TFLOPS:
        if words.issuperset(needed):
            return float32 if dtype == torch.float32 else bfloat16
    return None


def measured_tflops(device: torch.device, *, dtype: torch.dtype, size: int = 1024) -> float:
    """Rate of the best of five [size, size] matrix products in this process, as of now.

    About 0.1 s on a CPU at the default size. Processes that share cores take from one another.
    """
    left = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(6):  # the first warms up
        started = time.perf_counter()
        torch.mm(left, left)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return _MULTIPLY_ADD * size**3 / best / 1e12


def device_peak_tflops(device: torch.device, *, dtype: torch.dtype) -> float:
    """Peak rate of one device for `dtype` (bfloat16 or float32), in 10^12 FLOP/s.

    A known GPU's data sheet; on a CPU, and on a GPU that is not in the table, what a matrix product
    reaches.
    """
    if device.type == "cuda":
        known = known_peak_tflops(torch.cuda.get_device_name(device), dtype=dtype)
        return known or measured_tflops(device, dtype=dtype, size=8192)
    return measured_tflops(device, dtype=dtype)
