"""How the doctor reads versions, GPUs, files, folders and interfaces; and the roll call."""

import json
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import TCPStore

from rlhf_megatron.config import Config, load_config
from rlhf_megatron.distributed import roll_call
from rlhf_megatron.distributed.roll_call import call_roll
from rlhf_megatron.doctor import gather_files, gather_gpu, gather_software
from rlhf_megatron.doctor.bandwidth import scopes_of
from rlhf_megatron.doctor.gather import gather_rank, gather_variables, interface_problem
from rlhf_megatron.doctor.needs import needs_of, smallest_world
from rlhf_megatron.errors import UserError


@pytest.mark.parametrize(
    ("name", "text", "version"),
    [
        ("_version.py", "__version__ = version = '0.25.1'\n", "0.25.1"),
        ("_version.py", "version: str\nversion = '1.2'\n", "1.2"),
        ("package_info.py", 'MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = ""\n', "0.19.2"),
        ("VERSION", "2.14.1\n", "2.14.1"),
        ("__init__.py", '__version__ = "5.17.0"\n', "5.17.0"),
        ("__init__.py", "import os\n__version__ = os.sep\n", ""),
        ("__init__.py", "this is no Python", ""),
    ],
)
def test_versions_without_metadata(tmp_path: Path, name: str, text: str, version: str) -> None:
    (tmp_path / name).write_text(text)
    assert gather_software.version_in_files(tmp_path) == version


def plant_package(
    folder: Path, *, name: str, files: list[str], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed distribution, found before any other."""
    (folder / name).mkdir(parents=True)
    for file in files:
        path = folder / name / file
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    information = folder / f"{name}-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    (information / "RECORD").write_text("".join(f"{name}/{file},,\n" for file in files))
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    ("files", "is_nvidias"),
    [
        (["__init__.py", "models.py"], False),  # what PyPI carries as apex
        (["__init__.py", "optimizers/__init__.py"], True),
    ],
)
def test_apex_is_told_from_its_namesake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], is_nvidias: bool
) -> None:
    plant_package(tmp_path, name="apex", files=files, version="0.9.10", monkeypatch=monkeypatch)
    software = gather_software.gather_software(imports=False)
    assert software.packages["apex"].version == "0.9.10"
    assert software.apex_is_nvidias is is_nvidias
    assert software.packages["torch"].version == torch.__version__
    assert software.import_errors is None


def test_an_unpacked_package_has_a_version_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text('__version__ = "9.9"\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    found = gather_software.find_package("flash_attn")
    assert found is not None and (found.version, found.distribution) == ("9.9", "")


def test_imports_are_tried_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise ImportError('undefined symbol: x')\n")
    (tmp_path / "dies.py").write_text("import os; os._exit(7)\n")
    (tmp_path / "sound.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = gather_software.try_imports(["broken", "dies", "sound", "absent_altogether"])
    assert found == {
        "broken": "ImportError: undefined symbol: x",
        "dies": "exit code 7",
        "sound": "",
    }


def fake_smi(folder: Path, *, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that knows the older names of the slowdown fields only."""
    fake_smi(
        tmp_path,
        script="""case "$1" in
  *clocks_event_reasons*) echo 'Field "clocks_event_reasons" is not valid'; exit 2;;
  *clocks_throttle_reasons*) echo 'GPU-1a, Active, Not Active, Not Active'
                             echo 'GPU-2b, Not Active, Not Active, Not Active';;
  *) echo 'GPU-1a, 580.12, Enabled, 4, 1200, 1980, 88'
     echo 'GPU-2b, 580.12, [N/A], [N/A], 1980, 1980, [Not Supported]';;
esac""",
        monkeypatch=monkeypatch,
    )
    first, second = gather_gpu.gather_smi() or ()
    assert (first.uuid, first.uncorrected_ecc_errors) == ("1a", 4)
    assert first.slowdowns == ("hw_thermal_slowdown",) and first.clock_mhz == 1200
    assert second.uncorrected_ecc_errors is None and second.ecc_mode is None
    assert second.temperature_celsius is None and second.slowdowns == ()


@pytest.mark.parametrize("script", ["exit 9", "echo garbage", "echo No devices were found"])
def test_nvidia_smi_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake_smi(tmp_path, script=script, monkeypatch=monkeypatch)
    assert gather_gpu.gather_smi() is None


def test_no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gather_gpu.gather_smi() is None


def model_directory(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": torch.zeros(1000)}, folder / "model.safetensors")
    return folder


def test_files_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    paths = [model_directory(tmp_path / name) for name in ("a", "b", "c")]
    (paths[2] / "config.json").write_text('{"x": 1}')
    found = [gather_files.gather_files({"actor.model": str(p)}, weights=True)[0] for p in paths]
    assert [f.problem for f in found] == ["", "", ""]
    assert found[0].num_bytes > 4000
    assert found[0].fingerprint == found[1].fingerprint != found[2].fingerprint


def test_damaged_and_missing_files_are_found(tmp_path: Path) -> None:
    model = model_directory(tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    cut, absent, empty = gather_files.gather_files(
        {"actor.model": str(model), "data.prompts": "/no/such.jsonl", "ref.model": str(tmp_path)},
        weights=True,
    )
    assert "model.safetensors" in cut.problem
    assert "/no/such.jsonl" in absent.problem
    assert "no weights found" in empty.problem
    (quick,) = gather_files.gather_files({"actor.model": str(model)}, weights=False)
    assert quick.problem == ""


def test_the_folder_is_tried_without_being_made(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "new"
    probe = gather_files.leave_probe(str(target))
    assert probe is not None and probe.parent == tmp_path
    facts = gather_files.gather_folder(str(target), probe=probe, measure=True)
    assert facts.problem == "" and facts.is_shared and facts.path == str(tmp_path)
    assert (facts.write_bytes_per_second or 0) > 1e6 and facts.free_bytes > 0
    probe.unlink()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_or_not_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather_files, "SEEN_WITHIN_SECONDS", 0.3)
    (tmp_path / "file").write_text("")
    facts = gather_files.gather_folder(
        str(tmp_path / "file"), probe=tmp_path / "of_another_node", measure=True
    )
    assert "is a file" in facts.problem and not facts.is_shared
    assert gather_files.leave_probe(str(tmp_path / "file")) is None


def test_checkpoints_that_are_there_count(tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "step_000001" / "actor"
    step.mkdir(parents=True)
    (step / "weights").write_bytes(b"x" * 300)
    (step.parent / "manifest").write_bytes(b"x" * 20)
    facts = gather_files.gather_folder(str(tmp_path), probe=None, measure=False)
    assert facts.checkpoint_bytes == 320 and facts.write_bytes_per_second is None


@pytest.mark.parametrize(
    ("text", "is_problem"),
    [
        ("", False),
        ("^docker", False),
        ("eth", False),
        ("ib0,eth0", False),
        ("=eth0", False),
        ("=eth", True),
        ("ib", True),
    ],
)
def test_interfaces(text: str, is_problem: bool) -> None:
    assert bool(interface_problem(text, known={"lo", "eth0"})) is is_problem


def test_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "no_such_interface")
    monkeypatch.setenv("A_SECRET", "x")
    rank = gather_rank(
        rank=3, local_rank=1, local_world_size=2, device=torch.device("cpu"), measure=False
    )
    assert (rank.rank, rank.device, rank.gpus) == (3, "cpu", ())
    assert "no_such_interface" in rank.network_problem
    assert rank.open_files > 0 and rank.boot_id
    assert gather_variables()["NCCL_SOCKET_IFNAME"] == "no_such_interface"
    assert "A_SECRET" not in rank.variables


def test_scopes_put_each_rank_into_one_group() -> None:
    node, across = scopes_of(hostnames=["a", "b", "c"], ranks_per_node=2)
    assert node.groups == {"a": (0, 1), "b": (2, 3), "c": (4, 5)}
    assert across.groups == {"local rank 0": (0, 2, 4), "local rank 1": (1, 3, 5)}
    assert [s.name for s in scopes_of(hostnames=["a"], ranks_per_node=4)] == ["node"]
    assert [s.name for s in scopes_of(hostnames=["a", "b"], ranks_per_node=1)] == ["cross-node"]
    assert scopes_of(hostnames=["a"], ranks_per_node=1) == []
    twice = scopes_of(hostnames=["vm", "vm"], ranks_per_node=2)[0]
    assert len(twice.groups) == 2


def config_of(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text("run: {output_dir: runs/x}\n")
    return load_config([str(path)], overrides=overrides)


def test_the_smallest_world(tmp_path: Path) -> None:
    overrides = [
        "actor.parallel.tensor_model_parallel_size=4",
        "critic.parallel.pipeline_model_parallel_size=3",
        "rollout.tensor_parallel_size=2",
    ]
    assert smallest_world(config_of(tmp_path)) == 1
    assert smallest_world(config_of(tmp_path, *overrides)) == 12
    assert smallest_world(config_of(tmp_path, *overrides, "ref.parallel.ranks=0-15")) == 24


def test_needs_without_a_model(tmp_path: Path) -> None:
    config = config_of(tmp_path, "rollout.engine=hf", "actor.layer_spec=transformer_engine")
    needs = needs_of(config, architectures=None, world_size=8)
    assert needs.wants_transformer_engine and not needs.uses_vllm
    assert needs.checkpoint_bytes == 0 and needs.host_bytes_per_rank == 0


def answers_of(ranks: list[int], *, world_size: int, timeout_seconds: float) -> dict[int, str]:
    """What each rank that comes hears: "" where all came."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers: dict[int, str] = {}

    def come(rank: int) -> None:
        store = TCPStore(
            "127.0.0.1",
            server.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=20),
        )
        try:
            call_roll(
                store,
                rank=rank,
                world_size=world_size,
                local_world_size=2,
                timeout_seconds=timeout_seconds,
            )
            answers[rank] = ""
        except UserError as error:
            answers[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return answers


def test_all_come_to_the_roll_call() -> None:
    assert answers_of([0, 1, 2, 3], world_size=4, timeout_seconds=20) == dict.fromkeys(range(4), "")


def test_the_roll_call_names_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "LINGER_SECONDS", 0.1)
    monkeypatch.setattr(roll_call, "_slurm_nodes", lambda: ["n01", "n02", "n03"])
    answers = answers_of([0, 1, 4], world_size=6, timeout_seconds=0.5)
    assert set(answers) == {0, 1, 4} and len(set(answers.values())) == 1
    assert "ranks 2-3, 5 of 6 on n02, n03: not come within 0.5 s" in answers[0]
    assert "distributed.join_timeout_seconds" in answers[0]


def test_the_roll_call_without_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "ANSWER_GRACE_SECONDS", 0.2)
    answers = answers_of([1], world_size=2, timeout_seconds=0.3)
    assert "rank 1 on" in answers[1] and "rank 0 has not come within 0.3 s" in answers[1]


def test_json_of_a_needs_config_is_plain(tmp_path: Path) -> None:
    """The facts travel between ranks and into JSON."""
    needs = needs_of(config_of(tmp_path), architectures=None, world_size=1)
    assert json.loads(json.dumps(vars(needs.config)))["at_start"] is True
