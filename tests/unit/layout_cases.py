"""Small models with awkward numbers, and arrays laid out by plain loops: oracles for the layouts.

Nothing here uses the layout rules, except to place and to collect.
"""

from dataclasses import dataclass

import numpy as np

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import RankLayout
from rlhf_megatron.layout.tensors import Head, logical_tensors

Arrays = dict[str, np.ndarray]


def small(**changes: object) -> ModelArchitecture:
    """6 layers, 12 heads, 3 KV heads, an uneven vocabulary, head_dim not hidden / heads."""
    numbers: dict = {
        "family": "llama", "num_layers": 6, "hidden_size": 24, "ffn_hidden_size": 36,
        "num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 4, "vocab_size": 131,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return ModelArchitecture(**(numbers | changes))


ARCHITECTURES = {
    "llama_3_kv_heads": small(),
    "llama_1_kv_head_tied": small(num_key_value_heads=1, tie_word_embeddings=True),
    "llama_all_kv_heads": small(num_key_value_heads=12, vocab_size=64),
    "qwen2": small(family="qwen2", qkv_bias=True),
    "qwen2_tied_1_kv_head": small(
        family="qwen2", qkv_bias=True, tie_word_embeddings=True, num_key_value_heads=1
    ),
    "mistral": small(family="mistral", sliding_window=5, vocab_size=97),
    "qwen3": small(family="qwen3", qk_norm=True),
    "qwen3_tied_1_kv_head": small(
        family="qwen3", qk_norm=True, tie_word_embeddings=True, num_key_value_heads=1, num_layers=9
    ),
}


def random_state(arch: ModelArchitecture, *, head: Head, seed: int = 0) -> Arrays:
    generator = np.random.default_rng(seed)
    return {
        tensor.name: generator.integers(1, 10**6, size=tensor.shape)
        for tensor in logical_tensors(arch, head=head)
    }


def place(layout: RankLayout, *, state: Arrays, shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Zeros of the given shapes, with every box of the layout copied in."""
    parameters = {name: np.zeros(shape, dtype=np.int64) for name, shape in shapes.items()}
    for placement in layout:
        region = placement.region(placement.box)
        assert parameters[placement.parameter][region].shape == placement.box.shape
        parameters[placement.parameter][region] = state[placement.tensor][placement.box.slices()]
    return parameters


def collect(layout: RankLayout, *, parameters: Arrays, into: Arrays, counts: Arrays) -> None:
    """Copy every box back, counting how often each element is seen."""
    for placement in layout:
        box = placement.box
        into[placement.tensor][box.slices()] = parameters[placement.parameter][
            placement.region(box)
        ]
        counts[placement.tensor][box.slices()] += 1


@dataclass
class MegatronRank:
    """Where a rank stands, for the oracle."""

    tp: int
    tp_rank: int
    pp: int
    stage: int
    vpp: int = 1


def megatron_oracle(
    arch: ModelArchitecture, *, state: Arrays, at: MegatronRank, head: Head, fused_norms: bool
) -> Arrays:
    """A rank's parameters by plain loops over heads, as Megatron-Core's attention reads them."""

    def rows(array: np.ndarray) -> np.ndarray:
        return np.split(array, at.tp, axis=0)[at.tp_rank]

    def padded(array: np.ndarray) -> np.ndarray:
        size = len(array)
        while size % 64 or size % at.tp:
            size += 1
        return np.concatenate([array, np.zeros((size - len(array), array.shape[1]), dtype=int)])

    def qkv(layer: str, kind: str) -> np.ndarray:
        d = arch.head_dim
        query, key, value = (state[f"{layer}self_attn.{x}_proj.{kind}"] for x in "qkv")
        per_group = arch.num_attention_heads // arch.num_key_value_heads
        heads = []
        for group in range(arch.num_key_value_heads):
            for head_number in range(group * per_group, (group + 1) * per_group):
                heads.append(query[head_number * d : (head_number + 1) * d])
            heads.append(key[group * d : (group + 1) * d])
            heads.append(value[group * d : (group + 1) * d])
        return rows(np.concatenate(heads))

    found: Arrays = {}
    # Deal the layers out in packets: one for each stage, then again from the first stage on.
    packets = np.split(np.arange(arch.num_layers), at.pp * at.vpp)
    mine = [packets[turn * at.pp + at.stage] for turn in range(at.vpp)]
    prefixes = [f"chunk{turn}." if at.vpp > 1 else "" for turn in range(at.vpp)]
    first_chunk, last_chunk = prefixes[0], prefixes[-1]
    if at.stage == 0:
        found[first_chunk + "embedding.word_embeddings.weight"] = rows(
            padded(state["model.embed_tokens.weight"])
        )
    for prefix, layer, local in (
        (prefix, layer, local)
        for prefix, packet in zip(prefixes, mine, strict=True)
        for local, layer in enumerate(packet)
    ):
        hf = f"model.layers.{layer}."
        own = f"{prefix}decoder.layers.{local}."
        first, second = (
            ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
            if fused_norms
            else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
        )
        found[own + first] = state[hf + "input_layernorm.weight"]
        found[own + second] = state[hf + "post_attention_layernorm.weight"]
        found[own + "self_attention.linear_qkv.weight"] = qkv(hf, "weight")
        if arch.qkv_bias:
            found[own + "self_attention.linear_qkv.bias"] = qkv(hf, "bias")
        for which in "qk" if arch.qk_norm else "":
            norm = state[f"{hf}self_attn.{which}_norm.weight"]
            found[f"{own}self_attention.{which}_layernorm.weight"] = norm
        for name, mine in (("self_attn.o_proj", "self_attention.linear_proj"),
                           ("mlp.down_proj", "mlp.linear_fc2")):  # fmt: skip
            whole = state[f"{hf}{name}.weight"]
            found[f"{own}{mine}.weight"] = np.split(whole, at.tp, axis=1)[at.tp_rank]
        gate, up = (state[f"{hf}mlp.{x}_proj.weight"] for x in ("gate", "up"))
        found[own + "mlp.linear_fc1.weight"] = np.concatenate([rows(gate), rows(up)])
    if at.stage == at.pp - 1:
        found[last_chunk + "decoder.final_layernorm.weight"] = state["model.norm.weight"]
        if head == "value":
            found[last_chunk + "output_layer.weight"] = state["score.weight"]
        elif not arch.tie_word_embeddings:
            found[last_chunk + "output_layer.weight"] = rows(padded(state["lm_head.weight"]))
        elif at.pp > 1:
            found[last_chunk + "output_layer.weight"] = rows(
                padded(state["model.embed_tokens.weight"])
            )
        if head == "joint":
            found[last_chunk + "output_layer.value_head.weight"] = state["score.weight"]
    return found


def vllm_oracle(arch: ModelArchitecture, *, state: Arrays, tp: int, tp_rank: int) -> Arrays:
    """A rank's parameters by plain loops over heads, as vLLM's loaders fill them."""

    def rows(array: np.ndarray) -> np.ndarray:
        return np.split(array, tp, axis=0)[tp_rank]

    def padded(array: np.ndarray) -> np.ndarray:
        size = -(-len(array) // 64) * 64
        return np.concatenate([array, np.zeros((size - len(array), array.shape[1]), dtype=int)])

    def kv(array: np.ndarray) -> np.ndarray:
        d, heads = arch.head_dim, arch.num_key_value_heads
        # Query head q uses KV head q // (n / g): a rank needs the KV heads of its query heads.
        per_rank = arch.num_attention_heads // tp
        queries = range(tp_rank * per_rank, (tp_rank + 1) * per_rank)
        used = sorted({q // (arch.num_attention_heads // heads) for q in queries})
        return np.concatenate([array[h * d : (h + 1) * d] for h in used])

    found: Arrays = {
        "model.embed_tokens.weight": rows(padded(state["model.embed_tokens.weight"])),
        "model.norm.weight": state["model.norm.weight"],
    }
    if not arch.tie_word_embeddings:
        found["lm_head.weight"] = rows(padded(state["lm_head.weight"]))
    for layer in range(arch.num_layers):
        p = f"model.layers.{layer}."
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            found[p + name] = state[p + name]
        for kind in ("weight", "bias") if arch.qkv_bias else ("weight",):
            query, key, value = (state[f"{p}self_attn.{x}_proj.{kind}"] for x in "qkv")
            found[f"{p}self_attn.qkv_proj.{kind}"] = np.concatenate(
                [rows(query), kv(key), kv(value)]
            )
        for which in "qk" if arch.qk_norm else "":
            name = f"{p}self_attn.{which}_norm.weight"
            found[name] = state[name]
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            found[p + name] = np.split(state[p + name], tp, axis=1)[tp_rank]
        found[p + "mlp.gate_up_proj.weight"] = np.concatenate(
            [rows(state[p + "mlp.gate_proj.weight"]), rows(state[p + "mlp.up_proj.weight"])]
        )
    return found
