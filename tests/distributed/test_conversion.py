"""Hugging Face -> Megatron -> Hugging Face, by way of sharded checkpoints: every bit comes back.

In bfloat16, whose rounding would show any conversion; models with uneven vocabularies, few KV heads
and odd numbers of layers.
"""

import ast
import json
import os
from datetime import timedelta
from pathlib import Path

import plain_megatron
import pytest
import torch
import torch.distributed as dist
import transformers
from pool import run_ranks
from roles import CPU
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_tokenizer import save_tiny_model

from rlhf_megatron.checkpoint import convert
from rlhf_megatron.checkpoint.manifest import open_role
from rlhf_megatron.checkpoint.sharded import load_weights
from rlhf_megatron.distributed.groups import GroupFactory, build_role_groups
from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.models.build import build_model

VOCAB_SIZE = 200
"""Padded to 256 at TP 1, 2, 4 and to 384 at TP 3."""
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 60,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama_3_kv_heads": ("LlamaForCausalLM", {"num_key_value_heads": 3}),
    "llama_one_kv_head_tied": (
        "LlamaForCausalLM",
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}),
    "qwen2_tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8, "num_key_value_heads": 3}),
    "critic": ("LlamaForSequenceClassification", {"num_labels": 1}),
}
PAIRS = {
    # (tp, pp, virtual), from which to which; and the processes that export
    "3 KV heads": [
        ((1, 1, 1), (3, 2, 1), 1),
        ((3, 1, 1), (1, 3, 2), 2),
        ((1, 2, 3), (3, 1, 1), 3),
        ((1, 3, 1), (1, 1, 1), 1),
        ((3, 2, 1), (1, 2, 1), 2),
        ((1, 2, 1), (1, 3, 1), 3),
    ],
    "others": [
        ((1, 1, 1), (2, 2, 1), 1),
        ((2, 2, 1), (4, 1, 1), 2),
        ((4, 1, 1), (1, 3, 2), 3),
        ((1, 2, 3), (2, 1, 1), 1),
        ((2, 1, 1), (1, 2, 1), 2),
        ((1, 3, 1), (1, 1, 1), 3),
    ],
}


def make(kind, folder, *, dtype=torch.bfloat16):
    name, settings = MODELS[kind]
    torch.manual_seed(7)
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**(SIZES | settings)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)


def save_all(rank, folder):
    for kind in MODELS:
        make(kind, folder / kind)
    make("llama", folder / "fp32", dtype=torch.float32)
    make("llama", folder / "bin", dtype=torch.float32)
    tensors = load_file(folder / "bin" / "model.safetensors")
    (folder / "bin" / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for file, part in halves.items():
        torch.save({name: tensors[name] for name in part}, folder / "bin" / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "bin" / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    run_ranks(1, save_all, folder)
    return folder


def layout(tp, pp, virtual=1):
    return ParallelLayout(
        tuple(range(tp * pp)), tp, pp, virtual_pipeline_model_parallel_size=virtual
    )


def tensors_of(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def assert_same_tensors(found, expected):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def import_rank(rank, model, output, shape, role="actor", dtype="bfloat16"):
    report = convert.import_hf(model, output=output, role=role, layout=layout(*shape), dtype=dtype)
    return report.bytes_read


def convert_rank(rank, checkpoint, output, shape, role="actor"):
    convert.convert(checkpoint, output=output, roles=[role], layout=layout(*shape))


def export_rank(rank, checkpoint, output, max_shard_bytes=5e9, overwrite=False):
    report = convert.export_sharded(
        checkpoint,
        output=output,
        role=None,
        max_shard_bytes=max_shard_bytes,
        ranks_per_node=8,
        overwrite=overwrite,
    )
    return report.bytes_read


def result_of(results, steps, number, rank):
    """What a rank's step gave: `in_worlds` lists those that it took part in."""
    return results[sum(rank < size for size, _, _ in steps[:number])]


def ranks_of(shape):
    return shape[0] * shape[1]


def in_worlds(rank, steps):
    """Run each (world size, function, arguments) on the first ranks, as a job of its own: the
    processes are started once for all of them. Returns this rank's results."""
    pool_size = dist.get_world_size()
    dist.barrier()  # or a rank would leave the world while another still joins it
    dist.destroy_process_group()
    found = []
    for number, (size, function, arguments) in enumerate([*steps, (pool_size, None, ())]):
        if rank < size:
            join_world(rank, size=size, name=f"world{number}")
            if function is not None:
                found.append(function(rank, *arguments))
                dist.barrier()
                dist.destroy_process_group()
    return found


def join_world(rank, *, size, name):
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(name, store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=300),
    )


@pytest.mark.parametrize("kind", MODELS)
def test_round_trips_return_every_bit(sources, tmp_path, kind):
    source = sources / kind
    expected = tensors_of(source)
    role = "critic" if kind == "critic" else "actor"
    few = MODELS[kind][1].get("num_key_value_heads") == 3
    steps = []
    for number, (first, second, exporters) in enumerate(PAIRS["3 KV heads" if few else "others"]):
        at = tmp_path / str(number)
        at.mkdir()
        steps += [
            (ranks_of(first), import_rank, (source, at / "a", first, role)),
            (ranks_of(second), convert_rank, (at / "a", at / "b", second, role)),
            (exporters, export_rank, (at / "a", at / "from_a", 30_000)),
            (exporters, export_rank, (at / "b", at / "from_b")),
        ]
    results = run_ranks(6, in_worlds, steps, timeout_seconds=400)
    for result in sorted(tmp_path.glob("*/from_*")):
        assert_same_tensors(tensors_of(result), expected)
    size = sum(value.numel() * value.element_size() for value in expected.values())
    for number, (_, function, _) in enumerate(steps):
        if function is not convert_rank:  # every byte is read once over all ranks
            world_size = steps[number][0]
            read = sum(result_of(results[rank], steps, number, rank) for rank in range(world_size))
            assert read == size or (function is export_rank and read >= size)
    name, _ = MODELS[kind]
    auto = transformers.AutoModelForSequenceClassification
    auto = auto if kind == "critic" else transformers.AutoModelForCausalLM
    for result in (tmp_path / "0" / "from_a", tmp_path / "1" / "from_b"):
        again, info = auto.from_pretrained(result, output_loading_info=True, dtype="auto")
        assert type(again).__name__ == name
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert not info["mismatched_keys"]
        original = auto.from_pretrained(source, dtype="auto")
        assert_same_tensors(dict(again.named_parameters()), dict(original.named_parameters()))


def test_bin_shards_and_float32(sources, tmp_path):
    expected = tensors_of(sources / "fp32")
    for source in ("fp32", "bin"):
        run_ranks(2, import_rank, sources / source, tmp_path / source, (2, 1), "actor", "float32")
        run_ranks(1, export_rank, tmp_path / source, tmp_path / f"{source}_out")
        assert_same_tensors(tensors_of(tmp_path / f"{source}_out"), expected)


def test_a_critic_from_a_language_model_gets_a_head_of_zeros(sources, tmp_path):
    run_ranks(2, import_rank, sources / "llama", tmp_path / "critic", (1, 2), "critic")
    run_ranks(2, export_rank, tmp_path / "critic", tmp_path / "out")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.num_labels == 1
    assert model.score.weight.shape == (1, SIZES["hidden_size"])
    assert not model.score.weight.any()


def test_tokenizer_and_generation_config_travel_along(tmp_path):
    save_tiny_model(tmp_path / "in")
    run_ranks(1, import_rank, tmp_path / "in", tmp_path / "a", (1, 1), "actor", "float32")
    run_ranks(1, export_rank, tmp_path / "a", tmp_path / "out", 50_000)
    assert (
        not {p.name for p in (tmp_path / "in").iterdir()}
        - {p.name for p in (tmp_path / "out").iterdir()}
        - {"model.safetensors"}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("t1 t2").input_ids == [4, 5]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {p.name: p for p in (tmp_path / "out").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == set(files) and len(files) > 3
    for name, file in index["weight_map"].items():
        with safe_open(files[file], framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    sizes = [t.numel() * t.element_size() for t in tensors_of(tmp_path / "out").values()]
    assert index["metadata"]["total_size"] == sum(sizes)


# ---------- a plain Megatron-Core script reads what is written here ----------


def test_the_plain_script_imports_nothing_of_this_project():
    tree = ast.parse(Path(plain_megatron.__file__).read_text())
    roots = {
        (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert "megatron" in roots
    assert roots <= {"argparse", "json", "os", "pathlib", "megatron", "torch", "sys", "contextlib"}


@pytest.mark.parametrize("tp", [1, 2])
def test_plain_megatron_core_loads_it_and_says_what_transformers_says(sources, tmp_path, tp):
    run_ranks(4, import_rank, sources / "fp32", tmp_path / "a", (2, 2), "actor", "float32")
    tokens = torch.randint(0, VOCAB_SIZE, (2, 17), generator=torch.Generator().manual_seed(1))
    model = transformers.AutoModelForCausalLM.from_pretrained(sources / "fp32")
    with torch.no_grad():
        expected = model(tokens).logits
    weights, config = tmp_path / "a" / "actor" / "weights", sources / "fp32" / "config.json"
    for found in run_ranks(tp, plain_megatron.logits, weights, config, tp, tokens):
        torch.testing.assert_close(found[..., :VOCAB_SIZE], expected, atol=2e-4, rtol=0)


# ---------- what is refused, and what is left behind ----------


def message(rank, function, *arguments):
    """The UserError's message, which must come before any collective hangs."""
    try:
        function(rank, *arguments)
    except UserError as error:
        return str(error)
    return ""


def refused(world_size, function, *arguments):
    messages = set(run_ranks(world_size, message, function, *arguments))
    assert len(messages) == 1
    (text,) = messages
    assert text
    return text


@pytest.fixture(scope="module")
def checkpoint(sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "a"
    run_ranks(2, import_rank, sources / "llama_3_kv_heads", folder, (1, 2))
    return folder


def copy_tree(source, target):
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
    return target


def test_damaged_checkpoints_are_refused_by_name_and_nothing_is_left(checkpoint, tmp_path):
    def damaged(name):
        copy = copy_tree(checkpoint, tmp_path / name)
        return copy, sorted((copy / "actor" / "weights").glob("*.distcp"))

    copy, files = damaged("truncated")
    files[0].write_bytes(files[0].read_bytes()[:-100])
    files[1].unlink()
    text = refused(2, export_rank, copy, tmp_path / "out")
    assert f"{files[0]}: truncated" in text and f"{files[1]}: missing" in text
    assert text == refused(2, convert_rank, copy, tmp_path / "out", (1, 2))
    copy, _ = damaged("incomplete")
    (copy / "actor" / "weights" / "metadata.json").unlink()
    assert "no complete" in refused(1, export_rank, copy, tmp_path / "out")
    copy, _ = damaged("metadata")
    metadata = copy / "actor" / "weights" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:50])
    assert "truncated or damaged" in refused(1, export_rank, copy, tmp_path / "out")
    copy, _ = damaged("other_model")
    config_path = copy / "actor" / "hf" / "config.json"
    config = json.loads(config_path.read_text())
    config |= {"num_hidden_layers": 5, "vocab_size": 300, "tie_word_embeddings": True}
    config_path.write_text(json.dumps(config))
    text = refused(1, export_rank, copy, tmp_path / "out")
    assert "embedding.word_embeddings.weight: shape [256, 48], expected [300, 48]" in text
    assert "output_layer.weight: not a parameter of this model" in text
    assert "decoder.layers.mlp.linear_fc2.weight: shape [6, 48, 60], expected [5, 48, 60]" in text
    copy, _ = damaged("family")
    config_path = copy / "actor" / "hf" / "config.json"
    config_path.write_text(config_path.read_text().replace('"llama"', '"mamba"'))
    assert "model_type 'mamba' is not supported" in refused(1, export_rank, copy, tmp_path / "out")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"truncated", "incomplete", "metadata", "other_model", "family"}


def test_an_existing_output_is_kept_unless_told_otherwise(checkpoint, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "mine.txt").write_text("keep")
    assert "exists already" in refused(2, export_rank, checkpoint, output)
    assert "exists already" in refused(2, convert_rank, checkpoint, output, (1, 2))
    assert [path.name for path in output.iterdir()] == ["mine.txt"]
    run_ranks(1, export_rank, checkpoint, output, 5e9, True)
    assert not (output / "mine.txt").exists() and (output / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def load_at(rank, checkpoint_dir, shape):
    """Parameters after `load_weights` into a model full of ones: their sums of squares."""
    groups = build_role_groups(
        "actor", layout=layout(*shape), factory=GroupFactory(timeout_seconds=60)
    )
    role = open_role(checkpoint_dir, role="actor")
    model = build_model(
        role.arch, head="lm", groups=groups, precision="bf16", layer_spec_name="local",
        device=CPU, seed=1,
    )  # fmt: skip
    for parameter in model.parameters().values():
        parameter.data.fill_(1.0)
    load_weights(model, checkpoint=role)
    total = sum(p.double().pow(2).sum() for n, p in model.parameters().items() if "norm" not in n)
    dist.all_reduce(total)
    return total.item()


def test_padding_is_zero_after_a_load_at_another_layout(sources, checkpoint):
    tensors = tensors_of(sources / "llama_3_kv_heads")
    expected = sum(v.double().pow(2).sum() for n, v in tensors.items() if "norm" not in n).item()
    for shape in ((1, 1), (3, 1), (1, 3)):
        for found in run_ranks(ranks_of(shape), load_at, checkpoint, shape):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
