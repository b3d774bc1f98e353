"""Random pairs of strided blocks in one memory, and the check that the kernel copies them."""

from dataclasses import dataclass
from math import prod
from random import Random

import torch
from torch import Tensor

from rlhf_megatron.reshard.strided_copy import TILE_UNITS, Block, StridedCopies

DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Case:
    """`memory` holds bytes; the blocks' addresses count from its start and do not overlap."""

    memory: Tensor
    itemsize: int
    targets: list[Block]
    sources: list[Block]

    def view(self, block: Block, *, memory: Tensor) -> Tensor:
        elements = memory.view(DTYPES[self.itemsize])
        return elements.as_strided(block.shape, block.strides, block.address // self.itemsize)

    def expected(self, *, without: list[int]) -> Tensor:
        memory = self.memory.clone()
        for number, (target, source) in enumerate(zip(self.targets, self.sources, strict=True)):
            if number not in without:
                self.view(target, memory=memory).copy_(self.view(source, memory=memory))
        return memory


def make_case(random: Random, *, num_pairs: int, most: int) -> Case:
    """Shapes of up to four axes of up to `most` elements, with and without gaps between."""
    itemsize, at = random.choice(list(DTYPES)), 0
    targets, sources = [], []
    for _ in range(num_pairs):
        shape = tuple(random.choice((1, 2, 3, 4, 8)) for _ in range(random.randrange(4)))
        shape = (*shape, random.randint(1, max(1, most // prod(shape))))
        for side in (targets, sources):
            block, at = _block(random, shape=shape, itemsize=itemsize, at=at)
            side.append(block)
    memory = torch.randint(0, 256, (-(-at // 8) * 8,), dtype=torch.uint8)
    return Case(memory, itemsize, targets, sources)


def _block(random: Random, *, shape: tuple[int, ...], itemsize: int, at: int) -> tuple[Block, int]:
    strides, step = [], random.choice((1, 1, 1, 1, 2))
    for size in reversed(shape):
        strides.insert(0, step)
        step = step * size + random.choice((0, 0, 1, 4, 8))
    align = random.choice((itemsize, 8))
    start = -(-at // align) * align
    return Block(start, shape, tuple(strides)), start + step * itemsize


def check_kernel(device: torch.device, *, num_cases: int, most: int = 3 * TILE_UNITS) -> int:
    """The kernel against Tensor.copy_, by offsets from a base at both ends. Returns the number of
    copies that it made."""
    count = 0
    for seed in range(num_cases):
        case = make_case(Random(seed), num_pairs=1 + seed % 7, most=most)
        found = case.memory.to(device)
        copies = StridedCopies(
            case.targets, sources=case.sources, itemsize=case.itemsize, device=device
        )
        copies.run(target_base=found.data_ptr(), source_base=found.data_ptr())
        expected = case.expected(without=copies.left_out)
        assert torch.equal(found.cpu(), expected), f"seed {seed}"
        count += len(case.targets) - len(copies.left_out)
    return count
