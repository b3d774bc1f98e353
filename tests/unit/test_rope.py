"""Rotary frequencies, bit by bit those of transformers."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import small
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlhf_megatron.layout.rope_config import read_rope
from rlhf_megatron.models.rope import rope

FACTORS = st.floats(1.0, 64.0, allow_subnormal=False)
LINEAR = st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": FACTORS})
LLAMA3 = st.fixed_dictionaries(
    {
        "rope_type": st.just("llama3"),
        "factor": FACTORS,
        "low_freq_factor": st.floats(0.5, 2.0),
        "high_freq_factor": st.floats(2.5, 8.0),
        "original_max_position_embeddings": st.integers(16, 10_000),
    }
)
YARN = st.fixed_dictionaries(
    {
        "rope_type": st.just("yarn"),
        "factor": FACTORS,
        "original_max_position_embeddings": st.integers(16, 10_000),
    },
    optional={
        "beta_fast": st.floats(8.0, 64.0),
        "beta_slow": st.floats(0.5, 4.0),
        "attention_factor": st.floats(0.5, 2.0),
        "mscale": st.floats(0.5, 2.0),
        "mscale_all_dim": st.floats(0.5, 2.0),
        "truncate": st.booleans(),
    },
)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(LINEAR, LLAMA3, YARN),
    st.sampled_from([2, 4, 6, 64, 80, 128]),
    st.floats(100.0, 1e7),
)
def test_frequencies_and_attention_factor_are_those_of_transformers(parameters, head_dim, theta):
    parameters = parameters | {"rope_theta": theta}
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        rope_parameters=dict(parameters),
        max_position_embeddings=20_000,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    read = read_rope({"rope_parameters": parameters})
    assert read.problems == []
    found = rope(small(head_dim=head_dim, rope_theta=read.theta, rope_scaling=read.scaling))
    torch.testing.assert_close(found.frequencies, expected, rtol=1e-6, atol=0)
    assert found.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_plain_frequencies(theta):
    model = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2, rope_theta=theta)
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(model)
    found = rope(small(head_dim=32, rope_theta=theta))
    assert torch.equal(found.frequencies, embedding.inv_freq) and found.attention_factor == 1.0
