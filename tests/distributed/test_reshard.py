"""Resharding on gloo ranks against a full gather, and export against transformers."""

import json
import logging
import os

import pytest
import torch
import torch.distributed as dist
import transformers
from pool import run_ranks
from small_reshards import (
    ARCHITECTURES,
    CPU,
    filled,
    full_state,
    train_layouts,
    verdict,
    verify,
)

from rlhf_megatron.checkpoint import hf_write
from rlhf_megatron.checkpoint.hf_read import load_hf_checkpoint
from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.layout.boxes import Box
from rlhf_megatron.layout.vllm import vllm_layouts
from rlhf_megatron.reshard.execute import Resharder
from rlhf_megatron.reshard.plan import make_plan
from rlhf_megatron.reshard.verify import fingerprint


def sync(rank, name, source_layouts, engines, source_dtype, dtype):
    """Two syncs with different weights; the result must equal slices of the full state."""
    arch = ARCHITECTURES[name]
    target_layouts = vllm_layouts(arch, engines=engines)
    plan = make_plan(
        source_layouts,
        target_layouts,
        itemsize_bytes=dtype.itemsize,
        bucket_bytes=4096,
        ranks=[rank],
    )
    live = {}
    target = filled(target_layouts.get(rank, ()), state=None, dtype=dtype)
    resharder = Resharder(
        plan,
        rank=rank,
        group=dist.group.WORLD,
        source=lambda: live,
        target=target,
        dtype=dtype,
        device=CPU,
    )
    for seed in (1, 2):
        state = full_state(arch, seed=seed)
        live = filled(source_layouts.get(rank, ()), state=state, dtype=source_dtype)
        stats = resharder.run()
        resharder.release_buffers()
        rounded = {k: v.to(source_dtype) for k, v in state.items()}
        expected = filled(target_layouts.get(rank, ()), state=rounded, dtype=dtype)
        for parameter, value in expected.items():
            assert torch.equal(target[parameter], value), (name, rank, parameter)
        assert stats.bytes_received == stats.bytes_minimum == plan.minimum_bytes.get(rank, 0)
        assert stats.num_operations == plan.num_buckets
        report = verify(
            arch,
            rank=rank,
            source_layouts=source_layouts,
            target_layouts=target_layouts,
            source=live,
            target=target,
            dtype=dtype,
        )
        assert report.num_tensors == len(state)
    return stats.bytes_received


CASES = {
    # name: world size, training (tp, pp, dp, ranks), engines
    "tp2_pp2_to_tp2": (4, {"tp": 2, "pp": 2}, [(0, 1), (2, 3)]),
    "tp4_to_tp2_strided": (4, {"tp": 4, "pp": 1}, [(0, 2), (1, 3)]),
    "pp2_dp2_to_tp4": (4, {"tp": 1, "pp": 2, "dp": 2}, [(0, 1, 2, 3)]),
    "tp2_dp2_to_tp1": (4, {"tp": 2, "pp": 1, "dp": 2}, [(0,), (1,), (2,), (3,)]),
    "disjoint": (5, {"tp": 2, "pp": 1, "ranks": [0, 1]}, [(2, 4)]),
    "one_engine_of_a_subset": (4, {"tp": 2, "pp": 2}, [(1, 3)]),
}


def sync_each(rank, case):
    """Bytes received, by model."""
    _, training, engines = CASES[case]
    return {
        name: sync(rank, name, train_layouts(arch, **training), engines, *[torch.float32] * 2)
        for name, arch in ARCHITECTURES.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_a_sync_equals_slices_of_the_whole_at_the_minimum(case):
    world_size, _, engines = CASES[case]
    results = run_ranks(world_size, sync_each, case)
    rolling = {rank for engine in engines for rank in engine}
    for name in ARCHITECTURES:
        received = [result[name] for result in results]
        assert all(received[rank] == 0 for rank in range(world_size) if rank not in rolling)
        assert sum(received) > 0


@pytest.mark.parametrize(
    ("source_dtype", "dtype"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
)
def test_weights_are_converted_on_the_way(source_dtype, dtype):
    source = train_layouts(ARCHITECTURES["qwen2"], tp=2, pp=2)
    run_ranks(4, sync, "qwen2", source, [(0, 1), (2, 3)], source_dtype, dtype)


def faulty(rank, fault):
    """A sync with a planted fault; returns what the verification said."""
    arch = ARCHITECTURES["llama"]
    source_layouts = train_layouts(arch, tp=2, pp=2, dp=1)
    target_layouts = vllm_layouts(arch, engines=[(0, 1), (2, 3)])
    state = full_state(arch)
    source = filled(source_layouts[rank], state=state, dtype=torch.float32)
    target = filled(target_layouts[rank], state=state, dtype=torch.float32)
    if fault == "shift" and rank == 1:
        rows = target["model.layers.2.self_attn.o_proj.weight"]
        rows.copy_(rows.roll(1, dims=0))
    if fault == "skip" and rank in (2, 3):
        for parameter in target:
            if parameter.startswith("model.layers.3."):
                target[parameter].zero_()
    if fault == "stale" and rank == 3:
        target.update(
            filled(target_layouts[3], state=full_state(arch, seed=9), dtype=torch.float32)
        )
    if fault == "one bit" and rank == 2:
        target["model.norm.weight"].view(torch.int32)[3] ^= 1
    return verdict(
        arch,
        rank=rank,
        source_layouts=source_layouts,
        target_layouts=target_layouts,
        source=source,
        target=target,
    )


FAULTS = {
    "shift": ("model.layers.2.self_attn.o_proj.weight: the target", "rank 1 differs"),
    "skip": ("model.layers.3.mlp.down_proj.weight: the target", "rank 2, 3 differs"),
    "stale": ("model.embed_tokens.weight: the target", "rank 3 differs"),
    "one bit": ("model.norm.weight: the target", "rank 2 differs"),
    "none": ("", ""),
}


def all_faulty(rank):
    return {fault: faulty(rank, fault) for fault in FAULTS}


def test_verification_names_tensor_and_rank():
    first, *others = run_ranks(4, all_faulty)
    assert all(other == first for other in others)
    for fault, (named, ranks) in FAULTS.items():
        assert named in first[fault] and ranks in first[fault], fault
    assert first["none"] == ""


def test_fingerprints_of_disjoint_boxes_add_up_and_see_order_and_nan():
    value = torch.randn(6, 5).to(torch.bfloat16)
    value[1, 2] = float("nan")
    whole = Box((0, 0), (6, 5))
    kwargs = {"shape": (6, 5), "dtype": torch.bfloat16}
    total = fingerprint(value, box=whole, **kwargs)
    parts = [Box((a, c), (b, d)) for a, b in ((0, 2), (2, 6)) for c, d in ((0, 3), (3, 5))]
    found = sum(fingerprint(value[p.slices()], box=p, **kwargs) for p in parts)
    assert torch.equal(found, total)
    plain = 0
    for row in range(6):
        for column in range(5):
            box = Box((row, column), (row + 1, column + 1))
            plain += fingerprint(value[box.slices()], box=box, **kwargs).item()
    assert (plain - total.item()) % 2**64 == 0
    swapped = value.clone()
    swapped[[0, 3]] = value[[3, 0]]
    assert not torch.equal(fingerprint(swapped, box=whole, **kwargs), total)


def logged(rank, environment):
    os.environ.update(environment)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("rlhf_megatron.reshard")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    sync(rank, "llama", train_layouts(ARCHITECTURES["llama"], tp=1, pp=2), [(0, 1)],
         torch.float32, torch.float32)  # fmt: skip
    return records


def test_debug_logs_each_collective():
    (records, _) = run_ranks(2, logged, {"RLHF_MEGATRON_DEBUG": "1"})
    assert records and all("bytes" in r and " ms" in r for r in records)
    assert run_ranks(2, logged, {"RLHF_MEGATRON_DEBUG": "0"}) == [[], []]


def hf_model(directory, *, family="llama", tied=False, classification=False):
    """A random small model saved by transformers; returns it."""
    torch.manual_seed(0)
    numbers = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 67,
        "tie_word_embeddings": tied, "max_position_embeddings": 64, "num_labels": 1,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    prefix = {"llama": "Llama", "qwen2": "Qwen2"}[family]
    config = getattr(transformers, f"{prefix}Config")(**numbers)
    kind = "ForSequenceClassification" if classification else "ForCausalLM"
    model = getattr(transformers, prefix + kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return model


def round_trip(rank, model_dir, output_dir, training, head, max_shard_bytes, overwrite=False):
    arch = read_architecture(model_dir)
    layouts = train_layouts(arch, head=head, **training)
    parameters = filled(layouts.get(rank, ()), state=None, dtype=torch.float32)
    report = load_hf_checkpoint(
        model_dir, layout=layouts.get(rank, ()), parameters=parameters, arch=arch, head=head
    )
    try:
        hf_write.export_hf(
            output_dir,
            arch=arch,
            head=head,
            layouts=layouts,
            parameters=parameters,
            rank=rank,
            group=dist.group.WORLD,
            template_dir=model_dir,
            dtype=torch.float32,
            max_shard_bytes=max_shard_bytes,
            bucket_bytes=2048,
            overwrite=overwrite,
        )
    except UserError as error:
        return str(error)
    return report.bytes_read


@pytest.mark.parametrize(
    ("family", "tied", "training", "shard_bytes"),
    [
        ("llama", False, {"tp": 2, "pp": 2}, 5e9),
        ("llama", True, {"tp": 2, "pp": 2}, 8000),
        ("qwen2", False, {"tp": 1, "pp": 2, "dp": 2}, 8000),
        ("qwen2", True, {"tp": 4, "pp": 1}, 3000),
        ("llama", False, {"tp": 1, "pp": 1, "ranks": [2]}, 8000),
    ],
)
def test_import_and_export_give_the_model_back(tmp_path, family, tied, training, shard_bytes):
    model = hf_model(tmp_path / "in", family=family, tied=tied)
    output = tmp_path / "out"
    results = run_ranks(4, round_trip, tmp_path / "in", output, training, "lm", shard_bytes)
    assert all(isinstance(r, int) for r in results), results
    files = sorted(path.name for path in output.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < 5e9)
    assert (output / "model.safetensors.index.json").exists() == (len(files) > 1)
    assert (output / "tokenizer.json").exists() and (output / "generation_config.json").exists()
    again, info = type(model).from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_value_model_exports_as_sequence_classification(tmp_path, family):
    model = hf_model(tmp_path / "in", family=family, classification=True)
    output = tmp_path / "out"
    results = run_ranks(4, round_trip, tmp_path / "in", output, {"tp": 2, "pp": 2}, "value", 5e9)
    assert all(isinstance(r, int) for r in results), results
    again, info = type(model).from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert again.config.num_labels == 1
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    tokens = torch.randint(3, 67, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits)
    arch = read_architecture(output)
    assert (arch.head, arch.num_labels) == ("classification", 1)


def test_a_critic_from_a_language_model_exports_with_a_head(tmp_path):
    hf_model(tmp_path / "in")
    run_ranks(2, round_trip, tmp_path / "in", tmp_path / "out", {"tp": 2, "pp": 1}, "value", 5e9)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    again = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "out")
    assert again.score.weight.shape == (1, 16)


def test_an_existing_directory_is_kept_unless_told_otherwise(tmp_path):
    hf_model(tmp_path / "in")
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine.txt").write_text("keep")
    arguments = (tmp_path / "in", output, {"tp": 2, "pp": 1}, "lm", 5e9)
    messages = run_ranks(2, round_trip, *arguments)
    assert all("exists already" in m for m in messages)
    assert [p.name for p in output.iterdir()] == ["mine.txt"]
    run_ranks(2, round_trip, *arguments, True)
    assert not (output / "mine.txt").exists() and (output / "model.safetensors").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def full_disk(rank, *arguments):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    if rank == 1:
        hf_write.save_file = fail  # in this forked process only
    return round_trip(rank, *arguments)


def test_a_full_disk_on_one_rank_ends_all_and_leaves_nothing(tmp_path):
    hf_model(tmp_path / "in")
    messages = run_ranks(
        2, full_disk, tmp_path / "in", tmp_path / "out", {"tp": 2, "pp": 1}, "lm", 8000
    )
    assert all("No space left on device" in m for m in messages)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]
