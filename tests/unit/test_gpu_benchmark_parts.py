"""What the GPU benchmarks share: lengths, FLOPs, packing figures, kinds of kernels."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_profile import covered, from_trace, kind_of
from gpu_shapes import SHAPES, draw_lengths, lengths_of_about, prompt_token_ids, random_batch
from gpu_work import flops_of, packing_of


@pytest.mark.parametrize("name", SHAPES)
def test_lengths_are_seeded_and_realistic(name):
    shape = SHAPES[name]
    found = draw_lengths(shape, num_samples=4000)
    again = draw_lengths(shape, num_samples=4000)
    assert torch.equal(found.prompts, again.prompts)
    assert torch.equal(found.responses, again.responses)
    assert found.prompts.min() >= 1 and found.prompts.max() == shape.max_prompt_tokens
    assert found.responses.min() >= 1 and found.responses.max() == shape.max_response_tokens
    cut = (found.responses == shape.max_response_tokens).double().mean()
    assert 0.08 < cut < 0.16
    mean = found.responses.double().mean() / shape.max_response_tokens
    assert 0.4 < mean < 0.55


def test_responses_to_one_prompt_share_it():
    found = draw_lengths(SHAPES["tiny"], num_samples=12, responses_per_prompt=4)
    assert all(len(set(part.tolist())) == 1 for part in found.prompts.split(4))
    assert len(set(found.responses.tolist())) > 4


def test_samples_stop_at_the_budget():
    shape = SHAPES["tiny"]
    found = lengths_of_about(shape, num_tokens=4000)
    assert 4000 - shape.max_model_len < int(found.totals.sum()) <= 4000


def test_a_random_batch_has_what_an_update_needs():
    lengths = draw_lengths(SHAPES["tiny"], num_samples=5)
    batch = random_batch(lengths, vocab_size=512)
    assert batch.lengths.tolist() == lengths.totals.tolist()
    assert {"old_logprobs", "advantages", "values", "returns", "loss_mask"} <= set(batch.response)
    prompts = prompt_token_ids(batch)
    assert [list(p) for p in prompts] == [batch.prompt_tokens(i) for i in range(5)]


def products(arch, *, lengths, head_rows):
    """FLOPs by counting each product's sizes, token by token."""
    h, f, d = arch.hidden_size, arch.ffn_hidden_size, arch.head_dim
    q, kv = arch.num_attention_heads * d, arch.num_key_value_heads * d
    total = 0
    for length in lengths:
        for _ in range(length):
            weights = h * q + 2 * h * kv + q * h + 3 * h * f
            total += arch.num_layers * 2 * weights
        total += arch.num_layers * 2 * length * length * q  # scores and sum, half of each
    return total + 2 * h * arch.vocab_size * head_rows


def test_flops_are_those_of_the_products(tmp_path):
    arch = SHAPES["tiny"].write(tmp_path)
    batch = random_batch(draw_lengths(SHAPES["tiny"], num_samples=3), vocab_size=512)
    found = flops_of(arch, batch=batch, output_size=512, is_update=False)
    lengths = batch.lengths.tolist()
    assert found.all_tokens == products(arch, lengths=lengths, head_rows=batch.num_tokens)
    rows = batch.num_response_tokens
    assert found.response_tokens == products(arch, lengths=lengths, head_rows=rows)
    update = flops_of(arch, batch=batch, output_size=512, is_update=True)
    assert update.response_tokens == 3 * found.response_tokens
    critic = flops_of(arch, batch=batch, output_size=1, is_update=False)
    assert critic.response_tokens == critic.all_tokens


def test_packing_figures():
    batch = random_batch(draw_lengths(SHAPES["tiny"], num_samples=4), vocab_size=512)
    batch.prompt_lengths[:] = 1
    batch.response_lengths[:] = torch.tensor([9, 19, 29, 1])
    micros = [
        SimpleNamespace(tokens=torch.zeros(1, size), sample_rows=torch.tensor(rows))
        for size, rows in ((32, [0, 1]), (32, [2, 3]))
    ]
    found = packing_of(micros, batch=batch)
    assert found.padding_share == pytest.approx(1 - 62 / 64)
    assert found.imbalance == 0
    assert found.attention_imbalance == pytest.approx(904 / ((500 + 904) / 2) - 1)


def test_covered_counts_overlaps_once():
    assert covered([(5, 6), (0, 2), (1, 3), (1.5, 1.7)]) == 4
    assert covered([]) == 0


def test_a_trace_gives_busy_time_kernels_and_waits():
    gemm = {"cat": "kernel", "name": "nvjet_gemm"}
    events = [
        gemm | {"ts": 0.0, "dur": 30.0},
        gemm | {"ts": 50.0, "dur": 10.0},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 55.0, "dur": 10.0},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 0.0, "dur": 5.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 5.0},
        {"ph": "M", "name": "process_name"},
    ]
    found = from_trace(events, wall_seconds=1e-4)
    assert found.busy_seconds == pytest.approx(45e-6)
    assert found.host_waits == {"cudaStreamSynchronize": 1}
    assert found.num_kernels == 3
    kinds = {kind: kernel.seconds for kind, kernel in found.by_kind().items()}
    assert kinds == pytest.approx({"gemm": 40e-6, "copy": 10e-6})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "gemm"),
        ("void pytorch_flash::flash_bwd_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::exp_kernel", "elementwise"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda", "copy"),
        ("Memcpy HtoD (Pageable -> Device)", "copy"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>", "reduction"),
        ("void multi_tensor_apply_kernel<AdamFunctor>", "optimizer"),
        ("void transformer_engine::normalization::rmsnorm_fwd_general_kernel", "norm"),
        ("triton_poi_fused_mul_silu", "elementwise"),
        ("ncclDevKernel_AllReduce_Sum", "communication"),
    ],
)
def test_kernels_by_kind(name, kind):
    assert kind_of(name) == kind
