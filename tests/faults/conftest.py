"""Files and the unbroken run, shared by the tests of this folder."""

from pathlib import Path

import pytest
from tiny_run import make_files, preload, run_to_the_end, settings


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, prompts and a reward: see tiny_run.make_files."""
    preload("hf")
    folder: Path = tmp_path_factory.mktemp("faults")
    make_files(folder)
    return folder


@pytest.fixture(scope="session")
def whole(files: Path) -> Path:
    """The folder of a run that nothing has stopped."""
    run_to_the_end(settings(files, output=files / "whole"), logs=files / "whole_logs")
    return files / "whole"
