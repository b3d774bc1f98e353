"""Import from Hugging Face directories: values, slices, both file kinds, and every refusal."""

import json

import numpy as np
import pytest
import torch
from layout_cases import MegatronRank, megatron_oracle, small
from safetensors.torch import save_file

from rlhf_megatron.checkpoint.hf_read import load_hf_checkpoint
from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.megatron import megatron_rank_layout
from rlhf_megatron.layout.tensors import logical_tensors

ARCH = small(num_layers=2)


def random_tensors(arch, *, head="lm"):
    generator = torch.Generator().manual_seed(1)
    return {
        t.name: torch.randn(t.shape, generator=generator) for t in logical_tensors(arch, head=head)
    }


def write(directory, tensors, *, kind="single"):
    if kind == "bin":
        torch.save(tensors, directory / "pytorch_model.bin")
    elif kind == "single":
        save_file(tensors, directory / "model.safetensors")
    else:
        names = sorted(tensors)
        files = {"a": names[::2], "b": names[1::2]}
        suffix = "bin" if kind == "sharded_bin" else "safetensors"
        stem = "pytorch_model" if kind == "sharded_bin" else "model"
        for file, mine in files.items():
            part = {name: tensors[name] for name in mine}
            if kind == "sharded_bin":
                torch.save(part, directory / f"{file}.{suffix}")
            else:
                save_file(part, directory / f"{file}.{suffix}")
        index = {name: f"{file}.{suffix}" for file, mine in files.items() for name in mine}
        (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": index}))


def load(directory, *, arch=ARCH, head="lm", tp=1, pp=1, tp_rank=0, stage=0, fill=7.0):
    layout = megatron_rank_layout(
        arch,
        tensor_model_parallel_size=tp,
        tp_rank=tp_rank,
        pipeline_model_parallel_size=pp,
        stage=stage,
        head=head,
        fused_norms=False,
    )
    state = {t.name: np.zeros(t.shape, dtype=np.int64) for t in logical_tensors(arch, head=head)}
    at = MegatronRank(tp, tp_rank, pp, stage)
    shapes = megatron_oracle(arch, state=state, at=at, head=head, fused_norms=False)
    parameters = {name: torch.full(value.shape, fill) for name, value in shapes.items()}
    report = load_hf_checkpoint(
        directory, layout=layout, parameters=parameters, arch=arch, head=head
    )
    return report, parameters


@pytest.mark.parametrize("kind", ["single", "sharded", "bin", "sharded_bin"])
def test_each_rank_gets_its_slices_and_each_byte_is_read_as_often_as_it_is_held(tmp_path, kind):
    tensors = random_tensors(ARCH)
    write(tmp_path, tensors, kind=kind)
    state = {name: value.numpy() for name, value in tensors.items()}
    total = 0
    for tp_rank in range(3):
        for stage in range(2):
            report, found = load(tmp_path, tp=3, pp=2, tp_rank=tp_rank, stage=stage)
            at = MegatronRank(3, tp_rank, 2, stage)
            oracle = megatron_oracle(ARCH, state=state, at=at, head="lm", fused_norms=False)
            for name, expected in oracle.items():
                np.testing.assert_array_equal(found[name].numpy(), expected, err_msg=name)
            total += report.bytes_read
    norms = sum(v.numel() for k, v in tensors.items() if "norm" in k)
    assert total == 4 * (sum(v.numel() for v in tensors.values()) + 2 * norms)


def test_bf16_files_fill_float32_parameters_exactly(tmp_path):
    tensors = {k: v.bfloat16() for k, v in random_tensors(ARCH).items()}
    write(tmp_path, tensors)
    report, found = load(tmp_path)
    norm = found["decoder.final_layernorm.weight"]
    assert torch.equal(norm, tensors["model.norm.weight"].float())
    assert report.bytes_read == 2 * sum(v.numel() for v in tensors.values())


def test_a_value_model_from_a_language_model_keeps_its_head(tmp_path):
    write(tmp_path, random_tensors(ARCH))
    report, found = load(tmp_path, head="value", fill=0.0)
    assert not report.value_head_loaded
    assert not found["output_layer.weight"].any()


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_value_model_from_a_reward_model_takes_its_head(tmp_path, prefix):
    arch = small(num_layers=2, head="classification", num_labels=1)
    tensors = random_tensors(arch, head="value")
    stored = {k.replace("model.", prefix, 1): v for k, v in tensors.items()}
    write(tmp_path, stored)
    report, found = load(tmp_path, arch=arch, head="value")
    assert report.value_head_loaded
    assert torch.equal(found["output_layer.weight"], tensors["score.weight"])
    assert torch.equal(found["decoder.final_layernorm.weight"], tensors["model.norm.weight"])


def test_a_tied_model_may_store_its_output_layer_too(tmp_path):
    arch = small(num_layers=2, tie_word_embeddings=True)
    tensors = random_tensors(arch)
    write(tmp_path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    _, found = load(tmp_path, arch=arch, pp=2, stage=1)
    assert torch.equal(
        found["output_layer.weight"][: arch.vocab_size], tensors["model.embed_tokens.weight"]
    )
    assert not found["output_layer.weight"][arch.vocab_size :].any()


def test_all_problems_come_in_one_message_and_nothing_is_touched(tmp_path):
    tensors = random_tensors(ARCH)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]
    tensors["model.norm.weight"] = torch.zeros(5)
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(4)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    write(tmp_path, tensors)
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    text = str(caught.value)
    assert "4 problems" in text
    for part in (
        "model.layers.1.mlp.up_proj.weight: missing",
        "lm_head.weight: missing",
        "model.norm.weight: shape [5], expected [24]",
        "model.layers.0.self_attn.q_norm.weight: not a tensor of a llama model of 2 layers",
    ):
        assert part in text


def test_a_model_of_the_wrong_kind_is_refused(tmp_path):
    arch = small(num_layers=2, head="classification", num_labels=2)
    tensors = random_tensors(arch, head="value")
    tensors["score.weight"] = torch.zeros(2, 24)
    write(tmp_path, tensors)
    with pytest.raises(UserError, match="it has 2 labels"):
        load(tmp_path, arch=arch, head="value")
    with pytest.raises(UserError, match="a language model is needed"):
        load(tmp_path, arch=arch, head="lm")


@pytest.mark.parametrize("bytes_left", [0, 5, 100, 5000])
def test_truncated_files_are_refused(tmp_path, bytes_left):
    write(tmp_path, random_tensors(ARCH), kind="sharded")
    for name in ("a.safetensors", "b.safetensors"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:bytes_left])
    with pytest.raises(UserError, match=r"(?s)a\.safetensors: truncated.*b\.safetensors: trunc"):
        load(tmp_path)


def test_missing_files_and_broken_indexes_are_refused(tmp_path):
    with pytest.raises(UserError, match="no weights found"):
        load(tmp_path)
    write(tmp_path, random_tensors(ARCH), kind="sharded")
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(UserError, match=r"missing: b\.safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="weight_map"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"no zip")
    with pytest.raises(UserError, match="damaged PyTorch file"):
        load(tmp_path)
