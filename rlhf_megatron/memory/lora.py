"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), planned only: the trainer has none.

Adapters of rank r on every matrix of every layer, A [r, in] and B [out, r], cut as the matrix is.
Embedding, output and norms are frozen. The reference is the actor with its adapters off.
"""

from collections.abc import Iterable

from rlhf_megatron.memory.parameters import Shapes


def adapter_elements(chunks: Iterable[Shapes], *, rank: int) -> int:
    """Elements of a rank's adapters; the chunks' shapes are those of its part of each matrix."""
    return sum(
        rank * sum(shape)
        for shapes in chunks
        for name, shape in shapes.items()
        if ".layers." in name and len(shape) == 2
    )
