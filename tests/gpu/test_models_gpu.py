"""The Megatron models on a CUDA device, one rank in this process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from rlhf_megatron.batch import from_sequences
from rlhf_megatron.checkpoint.hf_read import load_hf_checkpoint
from rlhf_megatron.distributed.config import DistributedConfig
from rlhf_megatron.distributed.cpu_platform import is_redirected, use_cpu_in_place_of_cuda
from rlhf_megatron.distributed.groups import GroupFactory, build_role_groups
from rlhf_megatron.distributed.start import start
from rlhf_megatron.engine.microbatch import make_micro_batch
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.models.build import build_model
from rlhf_megatron.models.compat import transformer_engine_imports, varlen_attention


@pytest.fixture(scope="module")
def context():
    found = start(DistributedConfig())
    yield found
    dist.destroy_process_group()


SIZES = {
    "vocab_size": 131,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "mistral_window": MistralConfig(**SIZES, sliding_window=7, head_dim=64),
    "qwen3": Qwen3Config(**SIZES, head_dim=128),
}


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder / name)
    return folder


def test_nothing_is_redirected_where_there_is_a_gpu(context):
    assert context.device.type == "cuda"
    assert not is_redirected()
    assert torch.zeros(1, device="cuda").is_cuda
    with pytest.raises(RuntimeError, match="CUDA device"):
        use_cpu_in_place_of_cuda()


@pytest.mark.parametrize("window", [None, 5])
def test_varlen_attention_equals_attention_sequence_by_sequence(window):
    torch.manual_seed(0)
    lengths = [1, 7, 64, 33]
    q, k, v = (
        torch.randn(sum(lengths), heads, 64, device="cuda", dtype=torch.bfloat16)
        for heads in (8, 2, 2)
    )
    offsets = torch.tensor([0, 1, 8, 72, 105], dtype=torch.int32, device="cuda")
    got = varlen_attention(
        q,
        key=k,
        value=v,
        cu_seqlens=offsets,
        max_seqlen=64,
        scale=64**-0.5,
        sliding_window=window,
    )
    want = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        distance = torch.arange(end - begin, device="cuda")
        distance = distance[:, None] - distance[None, :]
        seen = (distance >= 0) & (distance < (window or 1000))
        one = [x[begin:end].float().transpose(0, 1)[None] for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*one, attn_mask=seen, enable_gqa=True)
        want.append(out[0].transpose(0, 1))
    assert_close(got.float(), torch.cat(want), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("spec", ["local", "transformer_engine"])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("bf16", 0.06), ("fp8", 0.5)])
@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_equal_transformers(context, model_dirs, family, precision, bound, spec):
    if spec == "transformer_engine" and not transformer_engine_imports():
        pytest.skip("Transformer Engine is not installed here")
    if spec == "transformer_engine" and precision == "fp32":
        bound = 5e-3  # its products run in TF32
    if spec == "local" and precision == "fp8":
        pytest.skip("8-bit floats need Transformer Engine's layers")
    model_dir = model_dirs / family
    arch = read_architecture(model_dir)
    groups = build_role_groups(
        "actor",
        layout=ParallelLayout((0,)),
        factory=GroupFactory(timeout_seconds=60, backend=context.backend),
    )
    model = build_model(
        arch,
        head="lm",
        groups=groups,
        precision="bf16" if precision == "fp8" else precision,
        layer_spec_name=spec,
        device=context.device,
        fp8=precision == "fp8",
        seed=1,
    )
    load_hf_checkpoint(
        model_dir,
        layout=model.rank_layout(0),
        parameters=model.parameters(),
        arch=arch,
        head="lm",
    )
    engine = ModelEngine(model, device=context.device)
    generator = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(0, 131, (n,), generator=generator).tolist()  # noqa: E731
    batch = from_sequences([draw(n) for n in (3, 9, 1)], responses=[draw(n) for n in (20, 1, 50)])
    assert engine.pad_to_multiple == (16 if precision == "fp8" else 1)
    micro = make_micro_batch(
        batch,
        samples=[0, 1, 2],
        fields=(),
        pad_to_multiple=engine.pad_to_multiple,
        device=context.device,
    )

    def outputs(hidden, micro_batch):
        found = engine.log_probs(hidden, micro_batch=micro_batch, temperature=0.7)
        return {"logprobs": (found.logprobs, micro_batch.response_rows)}

    got = engine.infer([micro], outputs=outputs, sizes={"logprobs": batch.num_response_tokens})
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).cuda().eval()
    want = []
    for i in range(len(batch)):
        ids = torch.tensor([batch.prompt_tokens(i) + batch.response_tokens(i)], device="cuda")
        with torch.no_grad():
            logprobs = (reference(ids).logits[0] / 0.7).log_softmax(-1)
        first = int(batch.prompt_lengths[i])
        want.append(logprobs[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0].cpu())
    assert (got["logprobs"] - torch.cat(want)).abs().max() <= bound
