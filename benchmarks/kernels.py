"""Single kernels of a training step, timed alone, beside what the chip allows.

    python benchmarks/kernels.py --shape llama-3.2-1b

On one GPU: matrix products of the shape's layers and head, variable-length attention (torch's, and
Transformer Engine's where it is installed), norm, rotation, SwiGLU and the passes over logits.
Means of 20 calls in a row; a pass over memory is set against a device copy's rate in this call. On
a CPU with --shape tiny --device cpu, to see that it works.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_machine import dense_tflops, describe, print_header, synchronize
from gpu_shapes import SHAPES, Shape, lengths_of_about
from torch import Tensor

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.models import fused
from rlhf_megatron.models.compat import transformer_engine_imports, varlen_attention

CALLS = 20
LOGITS_ROWS = 2048


class Probe:
    """Times calls on one device."""

    def __init__(self, device: torch.device, *, calls: int) -> None:
        self.device, self._calls = device, calls
        self.figures: dict[str, list[float]] = {}
        """Of a product: TFLOP/s of its three kinds. Else: ms, then what they are set against."""
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(self, *shape: int, grad: bool = False) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype).requires_grad_(grad)

    def ms(self, work: Callable[[], object]) -> float:
        """Of one call; three before them are not counted."""
        for _ in range(3):
            work()
        synchronize(self.device)
        started = time.perf_counter()
        for _ in range(self._calls):
            work()
        synchronize(self.device)
        return (time.perf_counter() - started) / self._calls * 1e3

    def copy_bytes_per_ms(self) -> float:
        """Read and written together, by a copy of 1 GiB on a GPU."""
        source = self.random((1 << 28) if self.device.type == "cuda" else (1 << 20))
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.ms(lambda: target.copy_(source))


def products(probe: Probe, *, arch: ModelArchitecture, tokens: int) -> None:
    qkv = (arch.num_attention_heads + 2 * arch.num_key_value_heads) * arch.head_dim
    heads = arch.num_attention_heads * arch.head_dim
    for name, rows, inner, columns in (
        ("qkv", tokens, arch.hidden_size, qkv),
        ("attention output", tokens, heads, arch.hidden_size),
        ("gate and up", tokens, arch.hidden_size, 2 * arch.ffn_hidden_size),
        ("down", tokens, arch.ffn_hidden_size, arch.hidden_size),
        ("head", LOGITS_ROWS, arch.hidden_size, arch.vocab_size),
    ):
        x, w = probe.random(rows, inner), probe.random(columns, inner)
        g = probe.random(rows, columns)
        flops = 2 * rows * inner * columns / 1e9  # per ms: TFLOP/s
        rates = [
            flops / probe.ms(work)
            for work in (lambda: x @ w.t(), lambda: g @ w, lambda: g.t() @ x)  # noqa: B023
        ]
        probe.figures[name] = rates
        print(
            f"{name + f' {rows} x {inner} x {columns}':<40} forward {rates[0]:.0f}, input gradient "
            f"{rates[1]:.0f}, weight gradient {rates[2]:.0f} TFLOP/s"
        )


def attention(probe: Probe, *, arch: ModelArchitecture, lengths: list[int]) -> None:
    """Causal, packed sequences."""
    if probe.device.type != "cuda":
        print("attention: needs a GPU")
        return
    heads, groups, dim = arch.num_attention_heads, arch.num_key_value_heads, arch.head_dim
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(probe.device, torch.int32)
    q, k, v = (probe.random(sum(lengths), n, dim, grad=True) for n in (heads, groups, groups))
    options = {"cu_seqlens": offsets, "max_seqlen": max(lengths), "scale": dim**-0.5}
    ways = {"torch": lambda: varlen_attention(q, key=k, value=v, **options)}
    if transformer_engine_imports():
        from transformer_engine.pytorch import DotProductAttention

        module = DotProductAttention(
            heads, dim, num_gqa_groups=groups, qkv_format="thd", attn_mask_type="padding_causal",
            softmax_scale=dim**-0.5,
        )  # fmt: skip
        ways["Transformer Engine"] = lambda: module(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_kv=offsets,
            max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths),
        )  # fmt: skip
    flops = sum(2 * n * n for n in lengths) * heads * dim / 1e9
    for name, way in ways.items():
        out = way()
        grad = torch.randn_like(out)
        forward = probe.ms(way)
        backward = probe.ms(
            lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)  # noqa: B023
        )
        probe.figures[f"attention, {name}"] = [forward, backward]
        print(
            f"attention, {heads} heads of {dim}, {name}: forward {forward:.3f} ms "
            f"({flops / forward:.0f} TFLOP/s), backward {backward:.3f} ms "
            f"({2 * flops / backward:.0f})"
        )


def passes(probe: Probe, *, arch: ModelArchitecture, tokens: int) -> None:
    """What memory bounds, beside the time that its bytes take at the rate of a copy."""
    rate = probe.copy_bytes_per_ms()
    x = probe.random(tokens, arch.hidden_size, grad=True)
    weight = probe.random(arch.hidden_size, grad=True)
    normed = F.rms_norm(x, weight.shape, weight, 1e-5)
    grad = torch.randn_like(normed)
    q = probe.random(tokens, arch.num_attention_heads, arch.head_dim)
    angles = probe.random(tokens, 1, arch.head_dim // 2)
    logits = probe.random(LOGITS_ROWS, arch.vocab_size)
    maxima = fused.row_maxima(logits, 1.0)
    targets = torch.zeros(LOGITS_ROWS, dtype=torch.int64, device=probe.device)
    zeros = torch.zeros(LOGITS_ROWS, device=probe.device)
    rows: list[tuple[str, Callable[[], object], int]] = [
        ("norm", lambda: F.rms_norm(x, weight.shape, weight, 1e-5), 2 * x.nbytes),
        (
            "norm, backward",
            lambda: torch.autograd.grad(normed, (x, weight), grad, retain_graph=True),
            3 * x.nbytes,
        ),
        ("rotation", lambda: fused.rotate(q, angles, angles), 2 * q.nbytes),
        ("logits: maxima", lambda: fused.row_maxima(logits, 1.0), logits.nbytes),
        ("logits: sums", lambda: fused.row_sums(logits, maxima, 1.0), logits.nbytes),
        (
            "logits: gradient",
            lambda: fused.grad_logits(logits, targets, maxima, zeros, zeros, zeros, 1.0),
            2 * logits.nbytes,
        ),
    ]
    if probe.device.type == "cuda":  # elsewhere it would ask for a C++ compiler
        from megatron.core.fusions.fused_bias_swiglu import swiglu, swiglu_back

        both = probe.random(tokens, 2 * arch.ffn_hidden_size)
        upper = probe.random(tokens, arch.ffn_hidden_size)
        rows += [
            ("SwiGLU", lambda: swiglu(both), both.nbytes + upper.nbytes),
            (
                "SwiGLU, backward",
                lambda: swiglu_back(upper, both),
                2 * both.nbytes + upper.nbytes,
            ),
        ]
    for name, work, num_bytes in rows:
        found = [probe.ms(work), num_bytes / rate]
        probe.figures[name] = found
        print(f"{name:<20} {found[0]:.3f} ms, its bytes at a copy's rate {found[1]:.3f}")


def measure(
    shape: Shape, *, arch: ModelArchitecture, device: torch.device, calls: int
) -> dict[str, list[float]]:
    probe = Probe(device, calls=calls)
    tokens = shape.micro_batch_tokens
    lengths: list[int] = lengths_of_about(shape, num_tokens=tokens).totals.tolist()
    print(f"  dense product: {dense_tflops(device):.1f} TFLOP/s")
    products(probe, arch=arch, tokens=tokens)
    attention(probe, arch=arch, lengths=lengths)
    passes(probe, arch=arch, tokens=tokens)
    print(f"  dense product: {dense_tflops(device):.1f} TFLOP/s, warm")
    return probe.figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder:
        arch = SHAPES[options.shape].write(folder)
    print_header(f"kernels, {options.shape}", machine=describe(device))
    found = measure(SHAPES[options.shape], arch=arch, device=device, calls=options.calls)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
