"""Small models cut for training and for engines, and what the verification of a sync says."""

import torch
import torch.distributed as dist

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.megatron import megatron_layouts
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.tensors import logical_tensors
from rlhf_megatron.reshard.verify import verify_reshard

CPU = torch.device("cpu")


def small(**changes) -> ModelArchitecture:
    numbers = {
        "family": "llama", "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 67,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return ModelArchitecture(**(numbers | changes))


ARCHITECTURES = {
    "llama": small(),
    "tied": small(tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2": small(family="qwen2", qkv_bias=True),
}


def full_state(arch, *, seed=0, head="lm"):
    generator = torch.Generator().manual_seed(seed)
    return {
        t.name: torch.randn(t.shape, generator=generator) for t in logical_tensors(arch, head=head)
    }


def filled(layout, *, state, dtype):
    """Parameters just large enough for the layout; NaN where state is None."""
    shapes = {}
    for p in layout:
        stop = [o + n for o, n in zip(p.offset, p.box.shape, strict=True)]
        shapes[p.parameter] = [
            max(x) for x in zip(stop, shapes.get(p.parameter, stop), strict=True)
        ]
    parameters = {name: torch.full(s, float("nan"), dtype=dtype) for name, s in shapes.items()}
    if state is not None:
        for p in layout:
            parameters[p.parameter][p.region(p.box)] = state[p.tensor][p.box.slices()].to(dtype)
    return parameters


def train_layouts(arch, *, tp, pp, dp=1, ranks=None, order=("tp", "dp", "pp"), head="lm"):
    parallel = ParallelLayout(
        ranks=tuple(range(tp * pp * dp)) if ranks is None else tuple(ranks),
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        data_parallel_size=dp,
        order=order,
    )
    return megatron_layouts(arch, parallel=parallel, head=head, fused_norms=False)


def verify(arch, *, rank, source_layouts, target_layouts, source, target, dtype=torch.float32):
    """Compare the two sides, over all ranks; raises RuntimeError where they differ."""
    return verify_reshard(
        source_layouts,
        target_layouts,
        rank=rank,
        group=dist.group.WORLD,
        source=source,
        target=target,
        shapes={t.name: t.shape for t in logical_tensors(arch, head="lm")},
        dtype=dtype,
        device=CPU,
    )


def verdict(arch, **sides) -> str:
    """What `verify` raises; "" where it finds nothing."""
    try:
        verify(arch, **sides)
    except RuntimeError as error:
        return str(error)
    return ""
