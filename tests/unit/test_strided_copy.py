"""Tables of strided copies, read as the kernel reads them, and the kernel in Triton's interpreter.

The oracle is Tensor.copy_.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strided_cases import make_case
from torch import Tensor

from rlhf_megatron.reshard import strided_copy
from rlhf_megatron.reshard.strided_copy import TILE_UNITS, Block, StridedCopies

CPU = torch.device("cpu")


def run_tables(copies: StridedCopies, *, memory: Tensor) -> None:
    """The kernel in plain Python: what each tile of each table moves."""
    for unit, tiles, rows in copies._tables:
        for number, tile in tiles.tolist():
            target, source, num_units, inner, middle, *steps = rows[number].tolist()
            index = torch.arange(tile * TILE_UNITS, min(num_units, (tile + 1) * TILE_UNITS))
            line = index // inner
            target_at, source_at = (
                index % inner + line % middle * steps[k + 1] + line // middle * steps[k]
                for k in (0, 2)
            )
            for byte in range(unit):
                memory[target + target_at * unit + byte] = memory[source + source_at * unit + byte]


@settings(max_examples=200, deadline=None)
@given(random=st.randoms(use_true_random=False), most=st.sampled_from((8, 300, 3 * TILE_UNITS)))
def test_tables_are_the_copies(random, most):
    case = make_case(random, num_pairs=3, most=most)
    copies = StridedCopies(case.targets, sources=case.sources, itemsize=case.itemsize, device=CPU)
    found = case.memory.clone()
    run_tables(copies, memory=found)
    assert torch.equal(found, case.expected(without=copies.left_out))
    for number in copies.left_out:
        target, source = case.targets[number], case.sources[number]
        axes = [axis for axis, size in enumerate(target.shape) if size > 1]
        last = axes[-1]
        has_gaps = (target.strides[last], source.strides[last]) != (1, 1)
        assert len(axes) + has_gaps > 3


def test_units_are_as_large_as_alignment_allows():
    def units(target: Block, source: Block) -> list[int]:
        copies = StridedCopies([target], sources=[source], itemsize=2, device=CPU)
        return [unit for unit, _, _ in copies._tables]

    rows = Block(0, (6, 8), (32, 1))
    assert units(Block.packed(1024, shape=(6, 8)), rows) == [8]
    assert units(Block.packed(1028, shape=(6, 8)), rows) == [4]
    assert units(Block.packed(1026, shape=(6, 8)), rows) == [2]
    assert units(Block.packed(1024, shape=(6, 7)), Block(0, (6, 7), (32, 1))) == [2]
    assert units(Block.packed(1024, shape=(6, 8)), Block(0, (6, 8), (31, 1))) == [2]
    # Contiguous at both ends: the shape's own axes do not matter.
    assert units(Block.packed(1024, shape=(4, 3)), Block.packed(0, shape=(4, 3))) == [8]


def test_a_copy_of_four_axes_is_left_out():
    block = Block(0, (2, 2, 2, 2), (100, 30, 10, 1))
    target = Block.packed(4096, shape=(2, 2, 2, 2))
    copies = StridedCopies([target], sources=[block], itemsize=2, device=CPU)
    assert copies.left_out == [0]


def test_a_copy_too_large_to_count_in_32_bits_is_left_out(monkeypatch):
    monkeypatch.setattr(strided_copy, "MOST_UNITS", 7)
    blocks = [Block.packed(0, shape=(n,)) for n in (28, 32)]
    copies = StridedCopies(blocks, sources=blocks, itemsize=2, device=CPU)
    assert copies.left_out == [1]


def test_no_copies_and_empty_ones_launch_nothing():
    empty = Block.packed(0, shape=(0, 5))
    for blocks in ([], [empty]):
        copies = StridedCopies(blocks, sources=blocks, itemsize=2, device=CPU)
        assert not copies._tables and not copies.left_out
        copies.run()


@pytest.mark.skipif(strided_copy.triton is None, reason="Triton is not installed here")
def test_the_kernel_in_the_interpreter():
    code = (
        "import strided_cases, torch\n"
        "print(strided_cases.check_kernel(torch.device('cpu'), num_cases=20))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 50
