"""FLOP counts against counts by hand and by torch's own counter."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from rlhf_megatron.observability.flops import (
    ArchitectureNumbers,
    device_peak_tflops,
    forward_flops,
    known_peak_tflops,
    matmul_parameters,
    measured_tflops,
    model_flops_utilization,
    training_flops,
)

SMALL = ArchitectureNumbers(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=12,
    num_attention_heads=4,
    num_query_groups=1,
    head_dim=3,
    output_size=20,
)


def test_a_case_counted_by_hand():
    # One layer: q 8x12, k and v 8x3 each, o 12x8, gate, up and down 8x12 each. Head: 8x20.
    layer = 96 + 24 + 24 + 96 + 96 + 96 + 96
    assert matmul_parameters(SMALL) == 2 * layer + 160
    # Sequences of 5 and 3: scores and weighted sum, 2 * s * s * 12 each, halved; two layers.
    attention = 2 * (2 * 25 * 12 + 2 * 9 * 12)
    assert forward_flops(SMALL, sequence_lengths=[5, 3]) == 2 * (2 * layer + 160) * 8 + attention
    assert training_flops(SMALL, sequence_lengths=[5, 3]) == 3 * forward_flops(
        SMALL, sequence_lengths=[5, 3]
    )
    assert forward_flops(SMALL, sequence_lengths=[]) == 0


class PlainDecoder(nn.Module):
    """The matrix products of SMALL, written out, with full (not causal) attention."""

    def __init__(self, a):
        super().__init__()
        self.a = a
        width, kv = a.num_attention_heads * a.head_dim, a.num_query_groups * a.head_dim
        shapes = [
            (a.hidden_size, width),
            (a.hidden_size, kv),
            (a.hidden_size, kv),
            (width, a.hidden_size),
            (a.hidden_size, a.ffn_hidden_size),
            (a.hidden_size, a.ffn_hidden_size),
            (a.ffn_hidden_size, a.hidden_size),
        ]
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in shapes)
            for _ in range(a.num_layers)
        )
        self.head = nn.Linear(a.hidden_size, a.output_size, bias=False)

    def forward(self, x):
        a, s = self.a, x.shape[0]
        for q, k, v, o, gate, up, down in self.layers:
            heads = q(x).view(s, a.num_attention_heads, a.head_dim).transpose(0, 1)
            keys, values = (
                m(x)
                .view(s, a.num_query_groups, a.head_dim)
                .transpose(0, 1)
                .repeat_interleave(a.num_attention_heads // a.num_query_groups, dim=0)
                for m in (k, v)
            )
            weights = torch.bmm(heads, keys.transpose(1, 2)).softmax(-1)
            mixed = torch.bmm(weights, values).transpose(0, 1).reshape(s, -1)
            x = x + o(mixed)
            x = x + down(F.silu(gate(x)) * up(x))
        return self.head(x)


@pytest.mark.parametrize("length", [1, 6, 11])
def test_forward_and_backward_match_torchs_counter(length):
    model = PlainDecoder(SMALL)
    x = torch.randn(length, SMALL.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as forward_counter:
        output = model(x)
    with FlopCounterMode(display=False) as backward_counter:
        output.sum().backward()
    a = SMALL
    causal_saving = a.num_layers * 2 * length**2 * a.num_attention_heads * a.head_dim
    forward = forward_flops(SMALL, sequence_lengths=[length])
    assert forward_counter.get_total_flops() == forward + causal_saving
    total = forward_counter.get_total_flops() + backward_counter.get_total_flops()
    assert total == training_flops(SMALL, sequence_lengths=[length]) + 3 * causal_saving


def test_a_known_model():
    smollm2 = ArchitectureNumbers(
        num_layers=30,
        hidden_size=576,
        ffn_hidden_size=1536,
        num_attention_heads=9,
        num_query_groups=3,
        head_dim=64,
        output_size=49152,
    )
    # 134,515,008 parameters, less 61 norms of 576; the tied embedding is counted once, as the head.
    assert matmul_parameters(smollm2) == 134_515_008 - 61 * 576


def test_utilization():
    share = model_flops_utilization(4e12, seconds=2.0, num_devices=4, peak_tflops=1.0)
    assert share == pytest.approx(0.5)
    assert model_flops_utilization(1.0, seconds=0.0, num_devices=1, peak_tflops=1.0) == 0.0


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756.5, 51.2),
        ("NVIDIA H100 NVL", 835.5, 60.0),
        ("NVIDIA GH200 480GB", 989.4, 66.9),
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA A10", 125.0, 31.2),
        ("NVIDIA L40S", 362.1, 91.6),
        ("NVIDIA L4", 121.0, 30.3),
        ("NVIDIA H20", 148.0, 44.0),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA Unheard Of", None, None),
        ("NVIDIA A10G", None, None),
    ],
)
def test_known_devices(name, bfloat16, float32):
    assert known_peak_tflops(name, dtype=torch.bfloat16) == bfloat16
    assert known_peak_tflops(name, dtype=torch.float32) == float32


def test_a_cpu_is_measured():
    rate = device_peak_tflops(torch.device("cpu"), dtype=torch.float32)
    assert 1e-4 < rate < 100
    assert 1e-6 < measured_tflops(torch.device("cpu"), dtype=torch.float32, size=64) < 100
