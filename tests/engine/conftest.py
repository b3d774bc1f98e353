"""The ranks of this folder's tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_ranks import RankForker


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[Callable[..., list[Any]]]:
    """See RankForker.run."""
    forker = RankForker()
    yield forker.run
    forker.close()
