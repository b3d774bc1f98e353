"""Joined copies against the transfers one by one."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import ARCHITECTURES

from rlhf_megatron.layout.boxes import Box
from rlhf_megatron.layout.megatron import megatron_layouts
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.layout.vllm import vllm_layouts
from rlhf_megatron.reshard.plan import Transfer, make_plan
from rlhf_megatron.reshard.strips import View, join

ROWS, COLUMNS = 40, 7


def transfer(source_row, target_row, *, rows=2, columns=(0, COLUMNS), src=0, dst=1, parameter="a"):
    box = Box((0, 0), (rows, columns[1] - columns[0]))
    return Transfer(
        src, dst, "t", box,
        parameter, (slice(source_row, source_row + rows), slice(*columns)),
        "b", (slice(target_row, target_row + rows), slice(0, columns[1] - columns[0])),
    )  # fmt: skip


def one_by_one(transfers, *, source, target):
    for t in transfers:
        target[t.target_parameter][t.target_region] = source[t.source_parameter][t.source_region]


def joined(strips, *, source, target):
    for strip in strips:
        strip.target.of(target).copy_(strip.source.of(source))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.builds(
            transfer,
            st.integers(0, ROWS - 3),
            st.integers(0, ROWS - 3),
            rows=st.integers(1, 3),
            columns=st.sampled_from([(0, COLUMNS), (2, 5)]),
            dst=st.integers(1, 2),
            parameter=st.sampled_from(["a", "c"]),
        ),
        max_size=8,
    ),
    st.integers(1, 5),
)
def test_strips_move_what_their_transfers_move(some, count):
    regular = [transfer(4 * k, 3 * k) for k in range(count)]
    transfers = regular + some
    # A target row may be written twice here, which no plan does: the order then must be kept too.
    generator = torch.Generator().manual_seed(0)
    source = {n: torch.randn(ROWS, COLUMNS, generator=generator) for n in ("a", "c")}
    plain, found = ({"b": torch.zeros(ROWS, COLUMNS)} for _ in range(2))
    one_by_one(transfers, source=source, target=plain)
    strips = join(transfers)
    assert sum(strip.numel for strip in strips) == sum(t.box.numel for t in transfers)
    joined(strips, source=source, target=found)
    assert torch.equal(found["b"], plain["b"])


def test_regular_transfers_are_one_strip_and_others_are_not():
    assert len(join([transfer(6 * k, 2 * k) for k in range(5)])) == 1
    apart = [
        transfer(0, 0), transfer(6, 2), transfer(13, 4),  # another distance
        transfer(19, 6, src=2), transfer(25, 8, parameter="c"), transfer(31, 10, rows=1),
        transfer(33, 11, rows=1, columns=(0, 3)),
    ]  # fmt: skip
    assert [strip.source.count for strip in join(apart)] == [2, 1, 1, 1, 1, 1]
    assert join([]) == []


def test_a_layer_takes_one_copy_a_tensor_whatever_its_kv_heads():
    arch = ARCHITECTURES["llama_all_kv_heads"]  # 12 KV heads: 36 boxes of QKV rows a layer
    source = megatron_layouts(
        arch, parallel=ParallelLayout((0,), 1, 1, 1), head="lm", fused_norms=False
    )
    target = vllm_layouts(arch, engines=[(0,)])
    copies = make_plan(source, target, itemsize_bytes=2, bucket_bytes=1 << 30).by_rank[0].copies
    assert len(copies) > 36 * arch.num_layers
    # q, k, v, o, gate with up, down and two norms a layer; embedding, norm and output beside
    assert len(join(copies)) == 8 * arch.num_layers + 3


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3).flatmap(
        lambda shape: st.tuples(
            st.just(tuple(shape)), st.tuples(*(st.integers(1, size) for size in shape))
        )
    ),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_what_lies_in_one_piece_is_what_torch_calls_contiguous(shapes, count, gap):
    parameter, region = shapes
    step = region[0] * gap
    rows = step * (count - 1) + region[0]
    tensor = torch.zeros(max(rows, parameter[0]), *parameter[1:])
    view = View("a", (0,) * len(region), region, count, step)
    assert view.lies_in({"a": tensor})
    assert view.lies_in_one_piece(tensor.shape) == view.of({"a": tensor}).is_contiguous()
