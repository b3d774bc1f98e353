"""Weight syncs over gloo at many pairs of layouts, for every family, against a full gather.

Bytes are counted where they are written, not in the plan.
"""

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.families import FAMILIES
from rlhf_megatron.layout.hf import hf_layout
from rlhf_megatron.layout.megatron import megatron_layouts, megatron_problems
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.tensors import logical_tensors
from rlhf_megatron.layout.vllm import vllm_problems, vllm_rank_layout
from rlhf_megatron.reshard.engines import propose_engines
from rlhf_megatron.reshard.execute import Resharder
from rlhf_megatron.reshard.plan import make_plan

CPU = torch.device("cpu")
DIRECT_BYTES = 256
"""So that these small models send both messages of one strip and packed ones."""
BUCKET_BYTES = 8192


def architectures() -> list[ModelArchitecture]:
    """Of each family: 1 KV head with tied embeddings, and 2, 3 and 6; an uneven vocabulary."""
    return [
        ModelArchitecture(
            family=family, num_layers=8, hidden_size=24, ffn_hidden_size=48,
            num_attention_heads=24, num_key_value_heads=heads, head_dim=12, vocab_size=131,
            tie_word_embeddings=heads == 1, qkv_bias=family == "qwen2", qk_norm=family == "qwen3",
        )
        for family in FAMILIES
        for heads in (1, 2, 3, 6)
    ]  # fmt: skip


def train(*, tp=1, pp=1, dp=1, vpp=1, first=0, order=("tp", "dp", "pp")) -> ParallelLayout:
    ranks = tuple(range(first, first + tp * pp * dp))
    return ParallelLayout(ranks, tp, pp, dp, order=order, virtual_pipeline_model_parallel_size=vpp)


PAIRS = {
    # name: training layout, engine size (0: a whole Hugging Face model a rank), rollout ranks, node
    "tp1_to_tp1": (train(), 1, range(1), 8),
    "pp2_to_tp1": (train(pp=2), 1, range(2), 8),
    "tp2_to_tp1": (train(tp=2), 1, range(2), 8),
    "pp2_to_tp2": (train(pp=2), 2, range(2), 8),
    "tp2_pp2_to_tp2": (train(tp=2, pp=2), 2, range(4), 8),
    "pp2_vpp2_to_tp2": (train(pp=2, vpp=2), 2, range(2), 8),
    "tp2_pp2_vpp2_to_tp4": (train(tp=2, pp=2, vpp=2), 4, range(4), 8),
    "tp4_to_tp2": (train(tp=4), 2, range(4), 8),
    "tp2_dp2_to_tp4": (train(tp=2, dp=2), 4, range(4), 8),
    "tp3_to_tp2": (train(tp=3), 2, range(2), 8),
    "tp2_pp2_to_tp3": (train(tp=2, pp=2), 3, range(1, 4), 8),
    "disjoint_tp2_to_tp2": (train(tp=2), 2, range(2, 4), 8),
    "behind_pp2_to_tp1": (train(pp=2, first=2), 1, range(4), 8),
    "tp2_pp2_to_hf": (train(tp=2, pp=2), 0, range(4), 8),
    "tp2_pp4_to_tp2": (train(tp=2, pp=4), 2, range(8), 8),
    "tp4_pp2_to_tp4": (train(tp=4, pp=2), 4, range(8), 8),
    "tp2_pp2_dp2_to_tp4": (train(tp=2, pp=2, dp=2), 4, range(8), 8),
    "pp4_dp2_to_tp2": (train(pp=4, dp=2), 2, range(8), 8),
    "tp8_to_tp4": (train(tp=8), 4, range(8), 8),
    "tp4_pp2_to_tp8": (train(tp=4, pp=2), 8, range(8), 8),
    "pipeline_fastest_to_tp4": (train(tp=2, pp=2, dp=2, order=("pp", "tp", "dp")), 4, range(8), 8),
    "two_nodes_tp2_pp2_dp2_to_tp2": (train(tp=2, pp=2, dp=2), 2, range(8), 4),
}  # fmt: skip


def cut(arch, *, size):
    """The layout of each shard of an engine."""
    if size == 0:
        return [hf_layout(arch, head="lm")]
    return [vllm_rank_layout(arch, tensor_parallel_size=size, tp_rank=k) for k in range(size)]


def fits(arch, *, layout, size) -> bool:
    return not megatron_problems(
        arch,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
    ) and not vllm_problems(arch, tensor_parallel_size=max(size, 1))


def shapes_of(layout):
    shapes = {}
    for p in layout:
        stop = [o + n for o, n in zip(p.offset, p.box.shape, strict=True)]
        old = shapes.get(p.parameter, stop)
        shapes[p.parameter] = [max(a, b) for a, b in zip(stop, old, strict=True)]
    return shapes


def gathered(layouts, *, own, shapes):
    """The whole tensors, from all ranks' parameters. Asserts that copies of a box agree."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    whole = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for rank, layout in layouts.items():
        for p in layout:
            place, value = whole[p.tensor][p.box.slices()], everyone[rank][p.parameter]
            value = value[p.region(p.box)]
            known = ~place.isnan()
            assert torch.equal(place[known], value[known]), (rank, p)
            place.copy_(value)
    assert not any(value.isnan().any() for value in whole.values())
    return whole


def sync_all(rank, pair):
    """Sync each family's models; returns [(family, received, minimum, largest buffers)]."""
    layout, size, ranks, node_size = PAIRS[pair]
    found = []
    for arch in architectures():
        if not fits(arch, layout=layout, size=size):
            continue
        source_layouts = megatron_layouts(arch, parallel=layout, head="lm", fused_norms=False)
        shards = cut(arch, size=size)
        engines = propose_engines(
            source_layouts, shards=shards, ranks=ranks, node_of=lambda r: r // node_size
        )
        target_layouts = {r: shards[k] for engine in engines for k, r in enumerate(engine)}
        plan = make_plan(
            source_layouts, target_layouts, itemsize_bytes=4, bucket_bytes=BUCKET_BYTES,
            node_of=lambda r: r // node_size, ranks=[rank],
        )  # fmt: skip
        tensors = logical_tensors(arch, head="lm")
        generator = torch.Generator().manual_seed(1)
        state = {t.name: torch.randn(t.shape, generator=generator) for t in tensors}
        source = {
            name: torch.zeros(shape)
            for name, shape in shapes_of(source_layouts.get(rank, ())).items()
        }
        for p in source_layouts.get(rank, ()):
            source[p.parameter][p.region(p.box)] = state[p.tensor][p.box.slices()]
        wanted = target_layouts.get(rank, ())
        target = {name: torch.zeros(shape) for name, shape in shapes_of(wanted).items()}
        stats = Resharder(
            plan, rank=rank, group=dist.group.WORLD, source=source, target=target,
            dtype=torch.float32, device=CPU, least_direct_bytes=DIRECT_BYTES,
        ).run()  # fmt: skip
        shapes = {t.name: t.shape for t in tensors}
        whole = gathered(source_layouts, own=source, shapes=shapes)
        for p in wanted:
            value = target[p.parameter][p.region(p.box)]
            assert torch.equal(value, whole[p.tensor][p.box.slices()]), (arch, rank, p)
        found.append((arch.family, stats.bytes_received, stats.bytes_minimum, stats.buffer_bytes))
    return found


@pytest.mark.parametrize("pair", PAIRS)
def test_a_sync_receives_the_minimum_and_equals_a_full_gather(pair):
    layout, _, ranks, _ = PAIRS[pair]
    world_size = max(*layout.ranks, *ranks) + 1
    results = run_ranks(world_size, sync_all, pair)
    assert {family for family, *_ in results[0]} == set(FAMILIES)
    received = sum(count for result in results for _, count, _, _ in result)
    minimum = sum(count for result in results for _, _, count, _ in result)
    print(f"{pair}: received {received}, minimum {minimum}, {len(results[0])} models")
    assert received == minimum
    assert (received > 0) == (pair != "tp1_to_tp1")
    # Two buffers to send from and two to receive in, each at most a bucket; a row may be longer.
    assert max(size for result in results for *_, size in result) <= 4 * BUCKET_BYTES
