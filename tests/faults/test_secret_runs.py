"""A secret of the configuration is in nothing that a run prints, saves or dies of."""

from pathlib import Path

from tiny_run import Job, metrics, settings

TOKEN, RENEWED = "tok-0123456789", "tok-9876543210"
ALONE = {
    "actor__parallel__tensor_model_parallel_size": 1,
    "actor__parallel__pipeline_model_parallel_size": 1,
    "critic__parallel__tensor_model_parallel_size": 1,
    "critic__parallel__pipeline_model_parallel_size": 1,
    "ref__parallel__tensor_model_parallel_size": 1,
    "ref__parallel__pipeline_model_parallel_size": 1,
    "rollout__tensor_parallel_size": 1,
    "warmup__steps": 0,
    "run__name": "x-${oc.env:RLHF_TEST_TOKEN}",
}


def run(files: Path, *, output: Path, logs: Path, token: str, **changes: object) -> Job:
    words = settings(files, output=output, **{**ALONE, **changes})
    return Job(words, logs=logs, world_size=1, environment={"RLHF_TEST_TOKEN": token})


def holding(folder: Path, *, token: str) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path.name for path in files if token.encode() in path.read_bytes()]


def test_a_run_and_its_resumption_save_no_secret(files: Path, tmp_path: Path) -> None:
    output, logs = tmp_path / "run", tmp_path / "logs"
    job = run(files, output=output, logs=logs, token=TOKEN, run__steps=1)
    assert job.wait() == [0], job.text()
    assert "${oc.env:RLHF_TEST_TOKEN}" in (output / "config.yaml").read_text()
    job = run(files, output=output, logs=logs, token=RENEWED, run__steps=2)
    assert job.wait() == [0], job.text()
    assert "resuming from " in job.text()
    assert "run.name changed" not in job.text()
    assert [line["step"] for line in metrics(output)] == [1, 2]
    for token in (TOKEN, RENEWED):
        assert holding(tmp_path, token=token) == []


def test_the_message_that_ends_a_run_holds_no_secret(files: Path, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os\n"
        "def score(**fields):\n"
        "    raise RuntimeError('401 for token ' + os.environ['RLHF_TEST_TOKEN'])\n"
    )
    changes = {"reward__function": f"{reward}:score", "evaluation__prompts": ""}
    logs = tmp_path / "logs"
    job = run(files, output=tmp_path / "run", logs=logs, token=TOKEN, **changes)
    assert job.wait() == [2], job.text()
    assert "401 for token ${oc.env:RLHF_TEST_TOKEN}" in job.text()
    assert holding(tmp_path, token=TOKEN) == []
