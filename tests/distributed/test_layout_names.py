"""The Megatron layout against the parameters of real GPTModels: names, shapes, coverage."""

import pytest
import torch
from pool import run_ranks

from rlhf_megatron.distributed.cpu_platform import use_cpu_in_place_of_cuda
from rlhf_megatron.distributed.groups import GroupFactory, build_role_groups
from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.cells import coverage_problems
from rlhf_megatron.layout.megatron import vocab_parameters
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.models.build import build_model


def small(**changes) -> ModelArchitecture:
    numbers = {
        "family": "llama", "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 67,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return ModelArchitecture(**(numbers | changes))


ARCHITECTURES = [
    small(),
    small(tie_word_embeddings=True, num_key_value_heads=1),
    small(family="qwen2", qkv_bias=True),
    small(family="qwen2", qkv_bias=True, tie_word_embeddings=True, num_key_value_heads=1),
    small(family="mistral", sliding_window=4),
    small(family="qwen3", qk_norm=True),
]


def problems_of_a_rank(rank, tp, pp, vpp):
    use_cpu_in_place_of_cuda()
    parallel = ParallelLayout(
        ranks=tuple(range(tp * pp)),
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
    )
    padded = vocab_parameters(virtual_pipeline_model_parallel_size=vpp)
    groups = build_role_groups("actor", layout=parallel, factory=GroupFactory(timeout_seconds=60))
    found, names = [], 0
    for arch in ARCHITECTURES:
        for head in ("lm", "value"):
            model = build_model(
                arch,
                head=head,
                groups=groups,
                precision="fp32",
                layer_spec_name="local",
                device=torch.device("cpu"),
                seed=0,
            )
            shapes = {name: tuple(p.shape) for name, p in model.parameters().items()}
            layout = model.rank_layout(rank)
            found += coverage_problems(layout, shapes=shapes, padded_parameters=padded)
            names += len(shapes)
    assert names >= len(ARCHITECTURES) * 2 * 6 * 4 // pp
    return found


@pytest.mark.parametrize(
    ("tp", "pp", "vpp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 2, 2), (2, 2, 2), (4, 1, 1)]
)
def test_every_parameter_is_covered_by_name_and_shape(tp, pp, vpp):
    assert run_ranks(tp * pp, problems_of_a_rank, tp, pp, vpp) == [[]] * (tp * pp)
