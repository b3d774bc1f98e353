"""A role's ranks as a grid of tensor, data and pipeline coordinates. Integers only."""

from collections.abc import Sequence
from dataclasses import dataclass

DIMENSIONS = ("tp", "dp", "pp")


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands in its role's grid."""

    tp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """`(ranks, layout, grid order)` of one role: global ranks, ascending, numbered over the grid
    with the first dimension of `order` fastest."""

    ranks: tuple[int, ...]
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    data_parallel_size: int = 1
    order: tuple[str, ...] = DIMENSIONS
    sequence_parallel: bool = False
    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks per rank: chunk v of stage p is part v * PP + p of the layers."""

    def __post_init__(self) -> None:
        assert sorted(self.order) == sorted(DIMENSIONS), self.order
        assert list(self.ranks) == sorted(set(self.ranks)), self.ranks
        assert len(self.ranks) == (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.data_parallel_size
        ), self
        assert self.virtual_pipeline_model_parallel_size == 1 or (
            self.pipeline_model_parallel_size > 1
        ), self

    def size(self, dimension: str) -> int:
        return {
            "tp": self.tensor_model_parallel_size,
            "dp": self.data_parallel_size,
            "pp": self.pipeline_model_parallel_size,
        }[dimension]

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of a global rank of the role."""
        index = self.ranks.index(rank)
        found: dict[str, int] = {}
        for dimension in self.order:
            index, found[dimension] = divmod(index, self.size(dimension))
        return Coordinates(**found)

    def rank(self, *, tp: int, dp: int, pp: int) -> int:
        """Global rank at the coordinates."""
        wanted = {"tp": tp, "dp": dp, "pp": pp}
        index, stride = 0, 1
        for dimension in self.order:
            index += wanted[dimension] * stride
            stride *= self.size(dimension)
        return self.ranks[index]


def parse_ranks(text: str, *, default: Sequence[int]) -> tuple[int, ...]:
    """ "all" -> default; "0-3,6" -> (0, 1, 2, 3, 6). Raises ValueError on anything else."""
    if text.strip() == "all":
        return tuple(default)
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        ranks.extend(range(int(first), int(last or first) + 1))
    if not ranks or ranks != sorted(set(ranks)):
        raise ValueError(f"{text!r} is not an ascending list of ranks such as 0-3,6")
    return tuple(ranks)
