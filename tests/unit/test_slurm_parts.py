"""The parts of the batch step: names of nodes, rules, containers, command lines. No Slurm."""

import ast
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.environment import adopt_slurm_environment
from rlhf_megatron.errors import ConfigError, UserError
from rlhf_megatron.slurm.allocation import Allocation, read_allocation
from rlhf_megatron.slurm.container import Container, choose_container, not_mounted
from rlhf_megatron.slurm.history import History, Start
from rlhf_megatron.slurm.hosts import (
    FIRST_PORT,
    NUM_PORTS,
    expand_hostlist,
    master_port,
    tasks_per_node,
)
from rlhf_megatron.slurm.node_check import BadNodes
from rlhf_megatron.slurm.plan import make_plan
from rlhf_megatron.slurm.steps import check_step, training_step
from rlhf_megatron.slurm.verdict import Ending, Limits, judge

ROOT = Path(__file__).parents[2]
LIMITS = Limits(fruitless=3, restarts=100)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[1-2,07,9-10]", "n1 n2 n07 n9 n10"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("login,gpu-a[1-2]-ib,x", "login gpu-a1-ib gpu-a2-ib x"),
        ("r[1-2]n[1,3]", "r1n1 r1n3 r2n1 r2n3"),
        ("n[099-101]", "n099 n100 n101"),
        ("", ""),
    ],
)
def test_hostlists(text: str, names: str) -> None:
    assert expand_hostlist(text) == names.split()


@pytest.mark.parametrize("text", ["n[1-3", "n1-3]", "n[3-1]", "n[a-b]", "n[[1]]", "n[]"])
def test_bad_hostlists(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        expand_hostlist(text)


@given(
    st.lists(
        st.lists(st.integers(0, 120), min_size=1, max_size=4, unique=True), min_size=1, max_size=4
    )
)
def test_hostlists_expand_to_what_they_were_made_of(groups: list[list[int]]) -> None:
    text = ",".join(f"p{i}x[{','.join(map(str, group))}]" for i, group in enumerate(groups))
    assert expand_hostlist(text) == [f"p{i}x{n}" for i, group in enumerate(groups) for n in group]


def test_tasks_per_node() -> None:
    assert tasks_per_node("8(x4)") == [8] * 4
    assert tasks_per_node("2(x2),1,3(x1)") == [2, 2, 1, 3]
    with pytest.raises(ValueError, match=r"8\(x4\)"):
        tasks_per_node("2x3")


def test_ports_of_neighbouring_jobs_and_restarts_differ() -> None:
    ports = {master_port(job, restarts=r) for job in range(100, 150) for r in range(20)}
    assert len(ports) == 50 * 20
    assert min(ports) >= FIRST_PORT and max(ports) < FIRST_PORT + NUM_PORTS <= 32768


STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[2,5]",
}
TORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def adopted(monkeypatch: pytest.MonkeyPatch, **environment: str) -> dict[str, str]:
    for name in [n for n in os.environ if n.startswith("SLURM") or n in TORCH]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in TORCH:  # what adopt sets goes again after the test
        if name not in environment:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
    adopt_slurm_environment()
    return {name: os.environ[name] for name in TORCH if name in os.environ}


def test_a_task_of_srun_knows_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = adopted(monkeypatch, **STEP)
    assert found == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n2",
        "MASTER_PORT": str(master_port(77, restarts=0)),
    }


def test_what_the_batch_script_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    found = adopted(monkeypatch, **STEP, MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29500")


@pytest.mark.parametrize("changes", [{"WORLD_SIZE": "2"}, {"SLURM_NTASKS": "1"}])
def test_torchrun_and_a_single_task_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    assert "RANK" not in adopted(monkeypatch, **(STEP | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "3,1"}, ["SLURM_TASKS_PER_NODE=3,1", "--ntasks-per-node"]),
        ({"SLURM_NODEID": "0"}, ["SLURM_PROCID=3", "--distribution=block"]),  # cyclic
        ({"SLURM_STEP_NODELIST": ""}, ["MASTER_ADDR", "SLURM_JOB_NODELIST"]),
    ],
)
def test_tasks_that_are_spread_wrongly_are_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        adopted(monkeypatch, **(STEP | changes))
    assert all(word in str(error.value) for word in words)


BATCH = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "PYTHON": sys.executable,
}


def test_allocation_of_an_array_element_names_the_element_alone() -> None:
    # Slurm gives the last element the array's own number.
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    found = read_allocation(BATCH | array | {"SLURM_RESTART_COUNT": "2"})
    assert (found.job, found.array_task, found.restarts) == ("12_3", 3, 2)
    plain = read_allocation(BATCH)
    assert (plain.job, plain.array_task, plain.nodes) == ("12", None, ("n1", "n2"))
    assert plain.tasks_per_node == 2 and not plain.has_gpus and plain.cpus_per_task is None


@pytest.mark.parametrize(
    ("environment", "word"),
    [({}, "sbatch"), (BATCH | {"SLURM_TASKS_PER_NODE": "2,1"}, "--ntasks-per-node")],
)
def test_no_allocation(environment: dict[str, str], word: str) -> None:
    with pytest.raises(UserError, match=word):
        read_allocation(environment)


def ending(code: int, **changes: object) -> Ending:
    plain: dict = {"asked_to_yield": False, "cancelled": False, "fruitless": 0, "restarts": 0}
    return Ending(exit_code=code, **(plain | changes))


@pytest.mark.parametrize(
    ("end", "requeue", "words"),
    [
        (ending(0), False, "done"),
        (ending(0, asked_to_yield=True), False, "done"),
        (ending(3, asked_to_yield=True), True, "before the time limit"),
        (ending(3), False, "stopped by hand"),
        (ending(3, cancelled=True), False, "cancelled"),
        (ending(137, cancelled=True), False, "cancelled"),
        (ending(2), False, "bad configuration"),
        (ending(2, asked_to_yield=True), False, "bad configuration"),
        (ending(1), True, "exit code 1"),
        (ending(137), True, "exit code 137"),
        (ending(1, fruitless=2), True, "exit code 1"),
        (ending(1, fruitless=3), False, "start 3 in a row.*MAX_ATTEMPTS=3.*first error"),
        (ending(3, fruitless=3, asked_to_yield=True), False, "more --time"),
        (ending(137, asked_to_yield=True), True, "came before the state was saved"),
        (ending(1, restarts=100), False, "100 times.*MAX_RESTARTS=100"),
        (ending(3, asked_to_yield=True, restarts=99), True, "time limit"),
        (ending(1, bad_nodes=("n2",), fruitless=1), True, "n2 did not pass"),
        (ending(1, bad_nodes=("n2",), fruitless=3), False, "nodes' reports"),
    ],
)
def test_rules_of_requeueing(end: Ending, requeue: bool, words: str) -> None:
    import re

    verdict = judge(end, limits=LIMITS)
    assert verdict.requeue is requeue
    assert re.search(words, verdict.reason), verdict.reason


def start(before: str, after: str) -> Start:
    return Start(0, "", "", ("n1",), (), 1, before, after, True, "")


def test_history_counts_starts_without_a_new_checkpoint(tmp_path: Path) -> None:
    history = History(tmp_path, job="12")
    counts = [history.num_fruitless()]
    for before, after in [("", ""), ("", "a"), ("a", "a"), ("a", "a"), ("a", "b"), ("b", "b")]:
        history.add(start(before, after))
        counts.append(history.num_fruitless())
    assert counts == [0, 1, 0, 1, 2, 0, 1]
    assert History(tmp_path, job="13").num_fruitless() == 0
    with (tmp_path / "slurm" / "job_12.jsonl").open("a") as file:
        file.write('{"restarts": 1, "beg')  # a crash in the middle of a line
    assert history.num_fruitless() == 1
    assert history.starts()[0] == start("", "")


def test_bad_nodes_are_listed_once(tmp_path: Path) -> None:
    listed = BadNodes(tmp_path / "deep" / "bad.txt")
    assert listed.among(["n1"]) == ()
    listed.add(["n2"], job="12", logs=tmp_path)
    listed.add(["n2", "n4"], job="13", logs=tmp_path)
    assert listed.among(["n1", "n2", "n3", "n4"]) == ("n2", "n4")
    lines = listed.path.read_text().splitlines()
    assert len(lines) == 2 and "job 12" in lines[0] and "check_n2.txt" in lines[0]
    listed.path.write_text(f"# n2 was mended\n\n{lines[1]}\n")
    assert listed.among(["n2", "n4"]) == ("n4",)


def allocation(**changes: object) -> Allocation:
    plain: dict = {
        "job": "12",
        "job_id": 12,
        "array_task": None,
        "restarts": 0,
        "nodes": ("n1", "n2"),
        "tasks_per_node": 2,
        "cpus_per_task": 6,
        "has_gpus": True,
    }
    return Allocation(**(plain | changes))


def test_command_lines_of_the_steps() -> None:
    plain = Container()
    words = training_step(["py", "x"], allocation=allocation(), container=plain, logs=Path("/l"))
    assert words[0] == "srun" and words[-2:] == ["py", "x"]
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--distribution=block"} < set(words)
    assert {"--kill-on-bad-exit=0", "--cpus-per-task=6", "--gpu-bind=none"} < set(words)
    assert "--output=/l/task_%4t.txt" in words
    on_cpu = allocation(has_gpus=False, cpus_per_task=None)
    words = check_step(["c"], node="n2", allocation=on_cpu, container=plain, logs=Path("/l"))
    assert {"--nodes=1", "--ntasks=1", "--nodelist=n2", "--overlap"} < set(words)
    assert not any(word.startswith(("--cpus-per-task", "--gpu")) for word in words)


def program(folder: Path, *, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    repository = tmp_path / "repo"
    image = tmp_path / "image.sif"
    image.touch()

    def chosen(name: str, mounts: str = "") -> Container:
        return choose_container(
            name, mounts=mounts, seen=(repository,), workdir=repository, gpus=True
        )

    assert chosen("") == Container()
    with pytest.raises(UserError, match="apptainer or singularity"):
        chosen(str(image))
    with pytest.raises(UserError, match="pyxis is not installed"):
        chosen("nvcr.io#nvidia/pytorch:25.09-py3")
    program(tmp_path / "bin", name="apptainer", text="true")
    program(tmp_path / "bin", name="srun", text="echo '  --container-image=X  [pyxis] ...'")
    with pytest.raises(UserError, match="no such file"):
        chosen(str(tmp_path / "other.sif"))
    apptainer = chosen(str(image), "/data:/d,/models")
    assert apptainer.srun_options() == []
    assert apptainer.wrap(["python", "x"]) == [
        *(str(tmp_path / "bin" / "apptainer"), "exec", "--nv"),
        *("--bind", "/data:/d", "--bind", "/models:/models"),
        *("--bind", f"{repository}:{repository}", "--pwd", str(repository), str(image)),
        *("python", "x"),
    ]
    pyxis = chosen("team/image:1", "/models")
    assert pyxis.wrap(["python"]) == ["python"]
    assert pyxis.srun_options() == [
        "--container-image=team/image:1",
        f"--container-mounts=/models:/models,{repository}:{repository}",
        f"--container-workdir={repository}",
    ]


def test_paths_that_a_container_does_not_see(tmp_path: Path) -> None:
    for name in ("seen", "unseen"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rewards.py").touch()
    container = Container("image", "pyxis", (f"{tmp_path}/seen:{tmp_path}/seen",))
    problems = not_mounted(
        container,
        overrides=[
            f"actor.model={tmp_path}/seen",
            f"reward.function={tmp_path}/unseen/rewards.py:score",
            "run.steps=3",
            "actor.model=/only/in/the/container",
        ],
    )
    assert len(problems) == 1
    assert problems[0].startswith("reward.function=")
    assert problems[0].endswith(f"CONTAINER_MOUNTS={tmp_path}/unseen")
    assert not_mounted(Container(), overrides=[f"a={tmp_path}"]) == []


CALL = ["--config", "configs/ppo_8b_8gpu.yaml", "--output-dir", "runs/x"]


def test_the_trainer_gets_folder_seed_and_the_users_words_last() -> None:
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    words = [
        *CALL,
        "run.steps=3",
        "run.output_dir=/tmp/r",
        "--config",
        "configs/quickstart_cpu.yaml",
    ]
    plan = make_plan(words, environment=BATCH | array, repository=ROOT)
    assert plan.run == Path("/tmp/r/seed_3")
    assert plan.logs == Path("/tmp/r/seed_3/logs/job_12_3.0")
    assert plan.bad_nodes == Path("/tmp/r/slurm/bad_nodes.txt")  # one for all seeds
    assert list(plan.train) == [
        *(sys.executable, "launch/train.py"),
        *("--config", "configs/ppo_8b_8gpu.yaml", "--config", "configs/quickstart_cpu.yaml"),
        *("run.output_dir=/tmp/r/seed_3", "checkpoint.resume=auto"),
        *("checkpoint.stop_before_minutes=0", "run.seed=3", "run.steps=3"),
    ]
    checked = (sys.executable, "tools/doctor.py", "--node-only", "--world-size=4")
    assert plan.check == checked + plan.train[2:]


def test_options_come_from_the_environment_too() -> None:
    environment = BATCH | {"NODE_CHECK": "{python} -c 1", "MAX_ATTEMPTS": "7", "BAD_NODES": "/b"}
    plan = make_plan(CALL, environment=environment, repository=ROOT)
    assert plan.check == (sys.executable, "-c", "1")
    assert (plan.limits.fruitless, plan.bad_nodes) == (7, Path("/b"))
    assert plan.run == ROOT / "runs" / "x"
    assert make_plan(CALL, environment=BATCH | {"NODE_CHECK": ""}, repository=ROOT).check == ()


def test_all_that_is_wrong_with_a_job_is_said_at_once() -> None:
    array = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "PYTHON": "/no/python"}
    words = [
        *("--config", "missing.yaml", "--output-dir", "x"),
        *("checkpoint.resume=never", "checkpoint.stop_before_minutes=5", "run.seed=1"),
        "run.output_dir=/r/${run.name}",
    ]
    with pytest.raises(ConfigError) as error:
        make_plan(words, environment=BATCH | array, repository=ROOT)
    for word in (
        "missing.yaml",
        "resume=never",
        "stop_before",
        "run.seed=1",
        "${run",
        "/no/python",
    ):
        assert sum(word in problem for problem in error.value.problems) == 1, word
    assert len(error.value.problems) == 6


def test_bad_usage_is_one_message() -> None:
    with pytest.raises(UserError, match="--no-such-option"):
        make_plan([*CALL, "--no-such-option"], environment=BATCH, repository=ROOT)


def test_the_batch_step_needs_python_3_9_and_its_library_alone() -> None:
    files = [ROOT / "launch/slurm_job.py", *sorted((ROOT / "rlhf_megatron/slurm").glob("*.py"))]
    files += [ROOT / "rlhf_megatron/errors.py", ROOT / "rlhf_megatron/__init__.py"]
    assert len(files) > 10
    for path in files:
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                own = name.startswith(("rlhf_megatron.slurm", "rlhf_megatron.errors"))
                assert own or name.split(".")[0] in sys.stdlib_module_names, f"{path}: {name}"
