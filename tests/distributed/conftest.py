"""Models shared by the tests of this folder."""

from pathlib import Path

import pytest
from pool import run_ranks
from small_models import save_models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of tiny models, named after small_models.KINDS."""
    folder: Path = tmp_path_factory.mktemp("models")
    run_ranks(1, save_models, folder)
    return folder
