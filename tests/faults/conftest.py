"""Files and the unbroken run, shared by the tests of this folder."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from kill_runs import make_whole
from tiny_run import ENGINE, make_files, preload


@dataclass(frozen=True)
class Whole:
    """A run that nothing has stopped."""

    folder: Path
    seconds: float


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, prompts and a reward: see tiny_run.make_files."""
    preload(ENGINE)
    folder: Path = tmp_path_factory.mktemp("faults")
    make_files(folder)
    return folder


@pytest.fixture(scope="session")
def unbroken(files: Path) -> Whole:
    seconds = make_whole(files, engine=ENGINE)
    return Whole(files / "whole", seconds)


@pytest.fixture(scope="session")
def whole(unbroken: Whole) -> Path:
    """The folder of the unbroken run, TP2 x PP2 on 4 ranks."""
    return unbroken.folder
