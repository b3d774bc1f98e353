"""Where the logical tensors lie in a vLLM model's parameters, rank by rank.

Names and orders of vLLM 0.25 and 0.32: model_executor/layers/linear.py (QKVParallelLinear,
MergedColumnParallelLinear) and vocab_parallel_embedding.py.
"""

from collections.abc import Iterator, Sequence

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import LogicalTensor, Placement, RankLayout
from rlhf_megatron.layout.cuts import VOCAB_PADDING, Rows, columns, share, stack, whole
from rlhf_megatron.layout.rules import Rule
from rlhf_megatron.layout.tensors import in_layer

VOCAB_PARAMETERS = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
"""The parameters that may hold padding rows."""


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the vocabulary over all ranks: the next multiple of 64."""
    return -(-vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def vllm_problems(arch: ModelArchitecture, *, tensor_parallel_size: int) -> list[str]:
    """Why vLLM cannot cut the model this way; empty where it can."""
    tp = tensor_parallel_size
    problems = [
        f"{name} {size} is no multiple of vLLM's tensor parallel size {tp}"
        for name, size in (
            ("attention heads", arch.num_attention_heads),
            ("feed-forward size", arch.ffn_hidden_size),
            ("padded vocabulary", padded_vocab_size(arch.vocab_size)),
        )
        if size % tp
    ]
    groups = arch.num_key_value_heads
    if groups % tp and tp % groups:
        problems.append(
            f"neither of KV heads {groups} and vLLM's tensor parallel size {tp} divides the other"
        )
    return problems


def vllm_rank_layout(
    arch: ModelArchitecture, *, tensor_parallel_size: int, tp_rank: int
) -> RankLayout:
    """The layout of one rank of an engine; the padding of the vocabulary belongs to no box."""
    rules = arch.rules
    cut = {"tp": tensor_parallel_size, "tp_rank": tp_rank}
    placements = list(_place(rules.embedding, parameter=rules.embedding.vllm, **cut))
    for layer in range(arch.num_layers):
        for rule in rules.layer:
            name = f"model.layers.{layer}.{rule.vllm}"
            placements.extend(_place(in_layer(rule, layer=layer), parameter=name, **cut))
    placements.extend(_place(rules.final_norm, parameter=rules.final_norm.vllm, **cut))
    if not arch.tie_word_embeddings:
        placements.extend(_place(rules.output, parameter=rules.output.vllm, **cut))
    return tuple(placements)


def vllm_layouts(
    arch: ModelArchitecture, *, engines: Sequence[Sequence[int]]
) -> dict[int, RankLayout]:
    """The layouts of all ranks of the engines (ascending rank lists); replicas share one object."""
    layouts: dict[int, RankLayout] = {}
    shared: dict[tuple[int, int], RankLayout] = {}
    for engine in engines:
        assert list(engine) == sorted(set(engine)), engine
        for shard, rank in enumerate(engine):
            key = (len(engine), shard)
            if key not in shared:
                shared[key] = vllm_rank_layout(
                    arch, tensor_parallel_size=len(engine), tp_rank=shard
                )
            layouts[rank] = shared[key]
    return layouts


def _place(rule: Rule, *, parameter: str, tp: int, tp_rank: int) -> Iterator[Placement]:
    """One rank's part of a parameter: its shard of each tensor, one after another."""
    if rule.kind == "replicated":
        yield whole(rule.tensors[0], parameter=parameter)
    elif rule.kind == "row":
        yield columns(
            rule.tensors[0], parameter=parameter, tensor_parallel_size=tp, tp_rank=tp_rank
        )
    elif rule.kind == "vocab":
        (tensor,) = rule.tensors
        rows = padded_vocab_size(tensor.shape[0])
        yield from stack(
            [Rows(tensor, 0, tensor.shape[0])],
            parameter=parameter,
            window=share(rows, parts=tp, index=tp_rank),
        )
    else:
        shards = [
            _shard(tensor, heads=_heads(rule, index), tp=tp, tp_rank=tp_rank)
            for index, tensor in enumerate(rule.tensors)
        ]
        rows = sum(shard.stop - shard.start for shard in shards)
        yield from stack(shards, parameter=parameter, window=range(rows))


def _heads(rule: Rule, index: int) -> int | None:
    """KV heads of a key or value tensor; None where rows are never replicated."""
    return rule.groups if rule.kind == "qkv" and index > 0 else None


def _shard(tensor: LogicalTensor, *, heads: int | None, tp: int, tp_rank: int) -> Rows:
    """This rank's rows; with fewer heads than ranks, tp / heads ranks in a row share a head."""
    parts, index = tp, tp_rank
    if heads is not None and heads < tp:
        parts, index = heads, tp_rank // (tp // heads)
    part = share(tensor.shape[0], parts=parts, index=index)
    return Rows(tensor, part.start, part.stop)
