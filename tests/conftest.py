"""For all tests: no time limit per example, since a busy machine is not a fault of the code; and
which of them may run side by side (pytest -n 2 --dist loadgroup, as `make test` does)."""

import pytest
from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

ONE_AFTER_ANOTHER = ("faults", "slurm")
"""Folders whose files share a long run, or a cluster on fixed ports: all of it in one worker."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file stay together, for what they share is made once."""
    for item in items:
        folder = item.path.parent.name
        group = folder if folder in ONE_AFTER_ANOTHER else f"{folder}/{item.path.stem}"
        item.add_marker(pytest.mark.xdist_group(group))
