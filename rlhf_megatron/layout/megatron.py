"""Where the logical tensors lie in a Megatron-Core GPTModel's parameters, rank by rank.

Names and orders of megatron-core 0.16.1 and 0.19.2: models/gpt/gpt_layer_specs.py (norm names),
transformer/attention.py (linear_qkv), transformer/mlp.py (linear_fc1 with gated_linear_unit).
"""

from collections.abc import Iterator
from math import lcm

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.boxes import LogicalTensor, Placement, RankLayout
from rlhf_megatron.layout.cuts import VOCAB_PADDING, columns, interleaved, share, stack, whole
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.rules import Rule
from rlhf_megatron.layout.tensors import VALUE_HEAD, Head, in_layer

_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT = "output_layer.weight"
_JOINT_VALUE_HEAD = "output_layer.value_head.weight"


def chunk_prefix(chunk: int, *, virtual_pipeline_model_parallel_size: int) -> str:
    """What a parameter's name begins with: "" where a rank holds one chunk, else "chunk0." etc."""
    return f"chunk{chunk}." if virtual_pipeline_model_parallel_size > 1 else ""


def vocab_parameters(*, virtual_pipeline_model_parallel_size: int = 1) -> frozenset[str]:
    """Names of the parameters that may hold padding rows."""
    size = virtual_pipeline_model_parallel_size
    first, last = (
        chunk_prefix(chunk, virtual_pipeline_model_parallel_size=size) for chunk in (0, size - 1)
    )
    return frozenset({first + _EMBEDDING, last + _OUTPUT})


def padded_vocab_size(vocab_size: int, *, tensor_model_parallel_size: int) -> int:
    """Rows of the vocabulary over all TP ranks: the next multiple of lcm(64, TP).

    Equal to vLLM's where TP divides 64, so that the shards' borders coincide.
    """
    multiple = lcm(VOCAB_PADDING, tensor_model_parallel_size)
    return -(-vocab_size // multiple) * multiple


def stage_layers(
    num_layers: int,
    *,
    pipeline_model_parallel_size: int,
    stage: int,
    virtual_pipeline_model_parallel_size: int = 1,
    chunk: int = 0,
) -> range:
    """Global numbers of the layers of one chunk of a pipeline stage.

    Chunks are dealt out in turn, as in arXiv:2104.04473, section 2.2: the first of every stage,
    then the second of every stage, and so on.
    """
    return share(
        num_layers,
        parts=pipeline_model_parallel_size * virtual_pipeline_model_parallel_size,
        index=chunk * pipeline_model_parallel_size + stage,
    )


def megatron_problems(
    arch: ModelArchitecture,
    *,
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
    virtual_pipeline_model_parallel_size: int = 1,
) -> list[str]:
    """Why the model cannot be cut this way; empty where it can."""
    tp, problems = tensor_model_parallel_size, []
    for name, size in (
        ("attention heads", arch.num_attention_heads),
        ("hidden size", arch.hidden_size),
        ("feed-forward size", arch.ffn_hidden_size),
    ):
        if size % tp:
            problems.append(f"{name} {size} is no multiple of tensor parallel size {tp}")
    groups = arch.num_key_value_heads
    if groups % tp and tp % groups:
        problems.append(f"neither of KV heads {groups} and tensor parallel size {tp} divides other")
    qkv_rows = (arch.num_attention_heads + 2 * groups) * arch.head_dim
    if qkv_rows % tp:
        problems.append(f"QKV rows {qkv_rows} are no multiple of tensor parallel size {tp}")
    pp, virtual = pipeline_model_parallel_size, virtual_pipeline_model_parallel_size
    if arch.num_layers % pp:
        problems.append(f"layers {arch.num_layers} are no multiple of pipeline parallel size {pp}")
    elif virtual > 1 and pp == 1:
        problems.append(f"virtual pipeline size {virtual} needs a pipeline parallel size above 1")
    elif arch.num_layers % (pp * virtual):
        problems.append(
            f"layers {arch.num_layers} are no multiple of pipeline parallel size {pp} x virtual"
            f" pipeline size {virtual}"
        )
    return problems


def megatron_rank_layout(
    arch: ModelArchitecture,
    *,
    tensor_model_parallel_size: int,
    tp_rank: int,
    pipeline_model_parallel_size: int,
    stage: int,
    head: Head,
    fused_norms: bool,
    virtual_pipeline_model_parallel_size: int = 1,
) -> RankLayout:
    """The layout of one rank, by GPTModel's `named_parameters()` names.

    `fused_norms`: the Transformer Engine layer spec; otherwise the local one. With tied embeddings
    and more than one stage the last one holds `output_layer.weight` as a second copy of the
    embedding; a value model's `output_layer.weight` is the replicated [1, hidden] head, and a joint
    model has that as `output_layer.value_head.weight`. With virtual stages each name begins with
    its chunk (`chunk_prefix`).
    """
    placements: list[Placement] = []
    for chunk in range(virtual_pipeline_model_parallel_size):
        placements += _chunk_layout(
            arch,
            cut={"tp": tensor_model_parallel_size, "tp_rank": tp_rank},
            part=chunk * pipeline_model_parallel_size + stage,
            num_parts=pipeline_model_parallel_size * virtual_pipeline_model_parallel_size,
            prefix=chunk_prefix(
                chunk, virtual_pipeline_model_parallel_size=virtual_pipeline_model_parallel_size
            ),
            head=head,
            fused_norms=fused_norms,
        )
    return tuple(placements)


def _chunk_layout(
    arch: ModelArchitecture,
    *,
    cut: dict[str, int],
    part: int,
    num_parts: int,
    prefix: str,
    head: Head,
    fused_norms: bool,
) -> Iterator[Placement]:
    """One of the `num_parts` parts of the layers, with what goes before or after them."""
    rules = arch.rules
    first, last = part == 0, part == num_parts - 1

    def place(rule: Rule, *, at: str = "") -> Iterator[Placement]:
        name = prefix + at + rule.megatron_name(fused_norms=fused_norms)
        return _place(rule, parameter=name, **cut)

    if first:
        yield from place(rules.embedding)
    for local, layer in enumerate(share(arch.num_layers, parts=num_parts, index=part)):
        for rule in rules.layer:
            yield from place(in_layer(rule, layer=layer), at=f"decoder.layers.{local}.")
    if last:
        yield from place(rules.final_norm)
        output = prefix + rules.output.megatron
        value_head = LogicalTensor(VALUE_HEAD, (1, arch.hidden_size))
        if head == "value":
            yield whole(value_head, parameter=output)
        elif not arch.tie_word_embeddings:
            yield from place(rules.output)
        elif not first:
            yield from _place(rules.embedding, parameter=output, **cut)
        if head == "joint":
            yield whole(value_head, parameter=prefix + _JOINT_VALUE_HEAD)


def megatron_layouts(
    arch: ModelArchitecture, *, parallel: ParallelLayout, head: Head, fused_norms: bool
) -> dict[int, RankLayout]:
    """The layouts of all ranks of a role; data-parallel replicas share one object."""
    shared: dict[tuple[int, int], RankLayout] = {}
    layouts: dict[int, RankLayout] = {}
    for rank in parallel.ranks:
        at = parallel.coordinates(rank)
        if (at.tp, at.pp) not in shared:
            shared[at.tp, at.pp] = megatron_rank_layout(
                arch,
                tensor_model_parallel_size=parallel.tensor_model_parallel_size,
                tp_rank=at.tp,
                pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
                stage=at.pp,
                head=head,
                fused_norms=fused_norms,
                virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
            )
        layouts[rank] = shared[at.tp, at.pp]
    return layouts


def _place(rule: Rule, *, parameter: str, tp: int, tp_rank: int) -> Iterator[Placement]:
    """One rank's part of a parameter."""
    if rule.kind == "replicated":
        yield whole(rule.tensors[0], parameter=parameter)
        return
    if rule.kind == "row":
        yield columns(
            rule.tensors[0], parameter=parameter, tensor_parallel_size=tp, tp_rank=tp_rank
        )
        return
    rows = sum(tensor.shape[0] for tensor in rule.tensors)
    if rule.kind == "vocab":
        rows = padded_vocab_size(rows, tensor_model_parallel_size=tp)
    # linear_qkv is cut by rows even where that goes through a KV group (fewer KV heads than TP):
    # attention.py gathers the activations and picks what each rank needs. linear_fc1 is gate then
    # up inside each shard, which is an interleaving over TP groups.
    groups = {"qkv": rule.groups, "gate_up": tp}.get(rule.kind, 1)
    yield from stack(
        interleaved(rule.tensors, groups=groups),
        parameter=parameter,
        window=share(rows, parts=tp, index=tp_rank),
    )
