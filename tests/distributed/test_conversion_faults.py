"""A full disk in the middle of a conversion, and the tools' own command lines."""

import errno
import os
import resource
import subprocess

import pytest
from pool import run_ranks
from test_conversion import convert_rank, export_rank, import_rank
from tiny_tokenizer import save_tiny_model

from rlhf_megatron.checkpoint import convert
from rlhf_megatron.errors import UserError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model of 2.2 MB and its checkpoint."""
    folder = tmp_path_factory.mktemp("faults")
    save_tiny_model(folder / "model", hidden_size=192, intermediate_size=384)
    run_ranks(2, import_rank, folder / "model", folder / "checkpoint", (1, 2), "actor", "float32")
    return folder


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def ignoring_free_space(rank, limit_bytes, function, *arguments):
    """The message of the UserError that ends a conversion which finds out in the middle."""
    convert.check_free_space = lambda *_, **__: None  # in this forked process only
    if limit_bytes and rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        function(rank, *arguments)
    except UserError as error:
        return str(error)
    return ""


CONVERSIONS = {
    "import": (import_rank, "model", ((2, 1), "actor", "float32")),
    "convert": (convert_rank, "checkpoint", ((2, 1),)),
    "export": (export_rank, "checkpoint", ()),
}


@pytest.mark.parametrize("name", CONVERSIONS)
@pytest.mark.parametrize("kind", ["disk", "limit"])
def test_a_disk_that_fills_up_ends_all_ranks_and_leaves_nothing(
    request, files, tmp_path, name, kind
):
    function, source, arguments = CONVERSIONS[name]
    if kind == "disk":
        folder, limit = request.getfixturevalue("small_disk"), 0
        text = os.strerror(errno.ENOSPC)
    else:
        folder, limit, text = tmp_path, 300_000, os.strerror(errno.EFBIG)
    found = run_ranks(
        2, ignoring_free_space, limit, function, files / source, folder / "out", *arguments
    )
    assert len(set(found)) == 1 and text in found[0], found
    assert list(folder.iterdir()) == []
