"""Checkpoints that are damaged, incomplete or of something else, and disks that cannot hold one:
one clear error on all ranks, and the checkpoint before still loads."""

import json
import os
import resource
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from pool import run_ranks
from roles import Shape
from saved_runs import Place, build_run
from updates import record_rollout

from rlhf_megatron.checkpoint import training_save
from rlhf_megatron.errors import UserError

ROOT = Path(__file__).parents[2]
SHAPE = Shape(tp=2)


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    path = tmp_path_factory.mktemp("rollout") / "rollout.pt"
    run_ranks(1, record_rollout, path, 4)
    return path


@pytest.fixture(scope="module")
def saved(models, rollout, tmp_path_factory) -> Place:
    """A run with checkpoints of steps 1 and 2."""
    output = tmp_path_factory.mktemp("saved") / "run"
    place = Place(models=models, rollout=rollout, output=output)
    run_ranks(2, two_checkpoints, place)
    return place


def two_checkpoints(rank, place) -> None:
    run = build_run(rank, place, SHAPE)
    for _ in range(2):
        run.round()
        run.save()


def _flip(path: Path, *, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 1
    path.write_bytes(content)


def truncated(folder: Path) -> None:
    path = folder / "actor/weights/__1_0.distcp"
    os.truncate(path, path.stat().st_size // 2)


def flipped(folder: Path) -> None:
    _flip(folder / "critic/optimizer/__1_0.distcp", at=0.6)


def missing(folder: Path) -> None:
    (folder / "actor/optimizer/__0_1.distcp").unlink()


def no_optimizer(folder: Path) -> None:
    shutil.rmtree(folder / "critic/optimizer")


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def flipped_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))


def flipped_state(folder: Path) -> None:
    _flip(folder / "state.json", at=0.5)


def no_generators(folder: Path) -> None:
    (folder / "rng/rank_0001.pt").unlink()


def no_checkpoint(folder: Path) -> None:
    shutil.rmtree(folder)


DAMAGES = {
    truncated: ["actor/weights/__1_0.distcp: truncated: ", "bytes instead of"],
    flipped: ["critic/optimizer/__1_0.distcp: damaged: its checksum"],
    missing: ["actor/optimizer/__0_1.distcp: missing"],
    no_optimizer: ["critic/optimizer/.metadata: missing", "critic/optimizer/__0_0.distcp: missing"],
    no_manifest: ["step_000002: not complete: a training checkpoint has manifest.json"],
    flipped_manifest: ["manifest.json: damaged: its checksum"],
    flipped_state: ["state.json: damaged"],
    no_generators: ["rng/rank_0001.pt: missing"],
    no_checkpoint: ["latest: names 'step_000002', which is not there; there is step_000001"],
}


def resume_damaged(rank, place, copies) -> list[tuple[str, int]]:
    """For each damage: the error of an automatic resume, and the step that the checkpoint before
    gives where it is asked for."""
    run, found = build_run(rank, place, SHAPE), []
    for number, damage in enumerate(DAMAGES):
        output = copies / str(number)
        if rank == 0:
            shutil.copytree(place.output, output)
            damage(output / "checkpoints/step_000002")
        dist.barrier()
        run.config.run.output_dir = str(output)
        run.config.checkpoint.resume = "auto"
        message = _error_of_resume(run)
        run.config.checkpoint.resume = str(output / "checkpoints/step_000001")
        run.resume()
        found.append((message, run.step))
    return found


def _error_of_resume(run) -> str:
    try:
        run.resume()
    except UserError as error:
        return str(error)
    return "resumed"


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_loads(saved, tmp_path):
    found = run_ranks(2, resume_damaged, saved, tmp_path)
    assert found[0] == found[1]
    for (message, step), (damage, phrases) in zip(found[0], DAMAGES.items(), strict=True):
        for phrase in phrases:
            assert phrase in message, (damage.__name__, message)
        assert "Traceback" not in message
        assert step == 1


def test_the_inspector_says_what_is_there_and_what_is_wrong(saved, tmp_path, capsys):
    program = ROOT / "tools/inspect_checkpoint.py"
    command = [sys.executable, str(program), str(saved.output), "--verify"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert said.count("complete, every byte verified") == 2
    assert said.count("the current one") == 1
    assert "critic/: value model" in said and "optimizer (exp_avg, exp_avg_sq)" in said

    main = runpy.run_path(str(program))["main"]

    def inspection(*arguments: str) -> tuple[int, str, str]:
        """The same in this process."""
        return main(arguments), *capsys.readouterr()

    output = tmp_path / "run"
    shutil.copytree(saved.output, output)
    flipped(output / "checkpoints/step_000002")
    folder = str(output / "checkpoints/step_000002")
    assert inspection(folder)[0] == 0  # not read
    code, said, wrong = inspection(folder, "--verify")
    assert code == 2 and "NOT COMPLETE" in said
    assert "critic/optimizer/__1_0.distcp: damaged" in wrong
    no_optimizer(output / "checkpoints/step_000001")
    code, said, wrong = inspection(str(output), "--json")
    first, second = json.loads(said)
    assert code == 2 and "critic/optimizer/.metadata: missing" in wrong
    assert (first["complete"], second["complete"], second["current"]) == (False, True, True)
    assert first["roles"]["critic"]["optimizer_states"] == []
    assert second["roles"]["actor"]["optimizer_states"] == ["exp_avg", "exp_avg_sq"]
    assert second["layouts"]["actor"]["tensor_model_parallel_size"] == 2

    assert inspection(str(tmp_path / "nowhere"))[0] == 2


def resume_as(rank, place, changes) -> str:
    run = build_run(rank, place, SHAPE)
    for key, value in changes.items():
        section, name = key.split(".")
        setattr(getattr(run.config, section), name, value)
    return _error_of_resume(run)


@pytest.mark.parametrize(
    ("models_of", "changes", "phrases"),
    [
        ({"actor": "one_kv_head"}, {}, ["another actor model: num_key_value_heads 2 -> 1"]),
        ({"actor": "qwen2"}, {}, ["another actor model: ", "qkv_bias False -> True"]),
        ({"critic": "one_kv_head_critic"}, {}, ["another critic model: num_key_value_heads"]),
        ({}, {"run.seed": 7, "data.shuffle": False}, ["run.seed: 1 -> 7", "data.shuffle: True"]),
        ({"precision": "bf16"}, {}, ["actor.precision: fp32 -> bf16"]),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(saved, models_of, changes, phrases):
    found = run_ranks(2, resume_as, replace(saved, **models_of), changes)
    assert found[0] == found[1]
    assert "of another run than the configuration describes" in found[0]
    for phrase in phrases:
        assert phrase in found[0]


@pytest.fixture
def small_disk(tmp_path):
    """A file system that holds one checkpoint of this run, not two."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill_the_disk(rank, place, look_first, limit_bytes) -> tuple[str, list[str], int]:
    """The error of the second save, what is then in the folder, and the step that is resumed."""
    if not look_first:
        training_save.check_free_space = lambda *_, **__: None  # in this forked process only
    run = build_run(rank, place, SHAPE)
    run.round()
    run.save()
    run.round()
    if limit_bytes and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    message = "saved"
    try:
        run.save()
    except UserError as error:
        message = str(error)
    dist.barrier()
    left = sorted(path.name for path in (place.output / "checkpoints").iterdir())
    run.resume()
    return message, left, run.step


@pytest.mark.parametrize("kind", ["disk", "disk found full on the way", "limit on one rank"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_one_error_and_leaves_the_checkpoint_before(
    request, models, rollout, tmp_path, kind, asynchronous
):
    limited = kind.startswith("limit")
    folder = tmp_path if limited else request.getfixturevalue("small_disk")
    place = Place(models=models, rollout=rollout, output=folder / "run", asynchronous=asynchronous)
    look_first = kind == "disk"
    found = run_ranks(2, fill_the_disk, place, look_first, 50_000 if limited else 0)
    assert found[0] == found[1]
    message, left, step = found[0]
    assert message.startswith("checkpoint: ") and "step_000002" in message
    assert ("File too large" if limited else "free") in message
    assert left == ["latest", "step_000001"]
    assert step == 1


def save_where_a_file_is(rank, place) -> str:
    run = build_run(rank, place, SHAPE)
    if rank == 0:
        place.output.mkdir()
        (place.output / "checkpoints").write_text("in the way")
    dist.barrier()
    try:
        run.save()
    except UserError as error:
        return str(error)
    return "saved"


def test_a_folder_that_cannot_be_made_is_one_error(models, rollout, tmp_path):
    """No permission looks the same to the program; root, whom tests may run as, has it always."""
    place = Place(models=models, rollout=rollout, output=tmp_path / "run")
    found = run_ranks(2, save_where_a_file_is, place)
    assert found[0] == found[1]
    assert found[0].startswith("checkpoint: ") and "Not a directory" in found[0]
