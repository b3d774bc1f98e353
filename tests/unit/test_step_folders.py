"""The folder of checkpoints: the marker, what stays, what goes, what a killed job leaves."""

import json
from pathlib import Path

import pytest

from rlhf_megatron.checkpoint.step_folders import (
    LATEST,
    complete_steps,
    current_checkpoint,
    go_back,
    make_current,
    prune,
    remove_leftovers,
    step_of,
    temporary_folder,
)
from rlhf_megatron.checkpoint.training_manifest import (
    TrainingManifest,
    damaged,
    missing_or_resized,
    read_training_manifest,
    record_file,
    share_of,
)
from rlhf_megatron.errors import UserError


def write_step(checkpoints: Path, step: int) -> Path:
    folder = temporary_folder(checkpoints, step=step, token="abc123")
    folder.mkdir(parents=True)
    (folder / "file").write_text(str(step))
    return make_current(folder)


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


def test_a_complete_checkpoint_becomes_current_under_its_own_name(tmp_path: Path) -> None:
    assert current_checkpoint(tmp_path) is None
    for step in (1, 2):
        folder = write_step(tmp_path, step)
        assert folder == tmp_path / f"step_{step:06d}" == current_checkpoint(tmp_path)
    assert names(tmp_path) == [LATEST, "step_000001", "step_000002"]
    again = write_step(tmp_path, 2)
    assert (again / "file").read_text() == "2"
    assert step_of(again) == 2 and step_of(tmp_path / "best") is None


def test_a_marker_without_its_checkpoint_is_an_error_not_another_checkpoint(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    for name in ("step_000007", "", "best", "../elsewhere"):
        (tmp_path / LATEST).write_text(name)
        with pytest.raises(UserError, match="which is not there; there is step_000001"):
            current_checkpoint(tmp_path)


def test_old_checkpoints_go_and_those_of_keep_every_stay(tmp_path: Path) -> None:
    for step in range(1, 11):
        current = write_step(tmp_path, step)
        prune(tmp_path, current=current, keep_last=2, keep_every=4)
    assert sorted(complete_steps(tmp_path)) == [4, 8, 9, 10]
    prune(tmp_path, current=tmp_path / "step_000004", keep_last=1, keep_every=0)
    assert sorted(complete_steps(tmp_path)) == [4, 10]


def test_going_back_removes_what_came_later(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_step(tmp_path, step)
    assert [path.name for path in go_back(tmp_path / "step_000001")] == [
        "step_000002",
        "step_000003",
    ]
    assert current_checkpoint(tmp_path) == tmp_path / "step_000001"
    assert names(tmp_path) == [LATEST, "step_000001"]


def test_what_a_killed_job_leaves_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    for name in ("step_000002.tmp-0a1b2c", "step_000000.old-ffffff", "best", "step_x"):
        (tmp_path / name).mkdir()
    assert sorted(complete_steps(tmp_path)) == [1]
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["best", LATEST, "step_000001", "step_x"]
    remove_leftovers(tmp_path / "nowhere")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name, size in (("a/one", 1000), ("a/two", 10), ("three", 500), ("four", 0)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(range(256)) * 4 if size == 1000 else b"x" * size)
    files = {
        path.relative_to(tmp_path).as_posix(): record_file(path)
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    TrainingManifest(
        step=3,
        run_id="r",
        written_at="2030-01-01T00:00:00Z",
        world_size=2,
        layouts={"actor": {"tensor_model_parallel_size": 2}},
        versions={"torch": "2"},
        files=files,
    ).write(tmp_path)
    return tmp_path


def test_a_manifest_comes_back_and_finds_nothing_wrong(checkpoint: Path) -> None:
    manifest = read_training_manifest(checkpoint)
    assert manifest.step == 3 and set(manifest.files) == {"a/one", "a/two", "three", "four"}
    assert manifest.num_bytes == 1024 + 10 + 500
    assert missing_or_resized(checkpoint, manifest=manifest) == []
    assert damaged(checkpoint, manifest=manifest, names=manifest.files) == []


def test_every_changed_file_is_named(checkpoint: Path) -> None:
    manifest = read_training_manifest(checkpoint)
    (checkpoint / "a/two").unlink()
    (checkpoint / "three").write_bytes(b"x" * 499)
    (checkpoint / "four").write_bytes(b"y")
    found = missing_or_resized(checkpoint, manifest=manifest)
    assert sorted(found) == [
        "a/two: missing",
        "four: too long: 1 bytes instead of 0",
        "three: truncated: 499 bytes instead of 500",
    ]
    content = bytearray((checkpoint / "a/one").read_bytes())
    content[77] ^= 128
    (checkpoint / "a/one").write_bytes(content)
    assert damaged(checkpoint, manifest=manifest, names=["a/one"]) == [
        "a/one: damaged: its checksum is not the one recorded"
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_ranks_share_the_files_out_without_gap_or_overlap(
    checkpoint: Path, world_size: int
) -> None:
    manifest = read_training_manifest(checkpoint)
    shares = [share_of(manifest, rank=r, world_size=world_size) for r in range(world_size)]
    assert sorted(name for share in shares for name in share) == sorted(manifest.files)


def test_any_flipped_bit_of_a_manifest_is_noticed(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    whole = path.read_bytes()
    plain = json.loads(whole)
    for position in range(0, len(whole), 7):
        content = bytearray(whole)
        content[position] ^= 1
        path.write_bytes(content)
        try:
            if json.loads(content) == plain:  # white space
                continue
        except ValueError:
            pass
        with pytest.raises(UserError, match=r"manifest.json: (damaged|format version)"):
            read_training_manifest(checkpoint)


def test_without_a_manifest_a_folder_is_not_complete(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not complete: a training checkpoint has manifest.json"):
        read_training_manifest(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        read_training_manifest(tmp_path / "nowhere")
