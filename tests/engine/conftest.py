"""The ranks of this folder's tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_ranks import RankForker


@pytest.fixture(scope="session")
def forker() -> Iterator[RankForker]:
    forker = RankForker()
    yield forker
    forker.close()


@pytest.fixture(scope="session")
def run_ranks(forker: RankForker) -> Callable[..., list[Any]]:
    """See RankForker.run."""
    return forker.run
