"""Whole runs whose critic is another architecture in another layout, or a head on the actor."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tiny_run import Job, assert_same_run, metrics, run_to_the_end, settings, weights
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2ForCausalLM

STEPS = 3
BEFORE = f"checkpoints/step_{STEPS - 1:06d}"
LAST = f"checkpoints/step_{STEPS:06d}"
OF_A_CRITIC = {"grad_norm/critic", "lr/critic"}


def tool(name: str, *words: object, logs: Path) -> str:
    """What it says; in one forked process. Others start the tools as users do."""
    return run_to_the_end([str(word) for word in words], logs=logs, world_size=1, tool=name).text()


def exported(checkpoint: Path, *, role: str, output: Path) -> dict[str, bytes]:
    words = ["--checkpoint", checkpoint, "--role", role, "--output", output]
    tool("megatron_to_hf", *words, logs=output.with_name(f"logs_{output.name}"))
    with safe_open(output / "model.safetensors", framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def run_and_resume(files: Path, folder: Path, **changes) -> Path:
    """A run of STEPS steps; and, in the folder beside it, the last of them once more."""
    run, again = folder / "run", folder / "again"
    changes["run__steps"] = STEPS
    run_to_the_end(settings(files, output=run, **changes), logs=folder / "logs_run")
    shutil.copytree(run, again)
    changes["checkpoint__resume"] = again / BEFORE
    run_to_the_end(settings(files, output=again, **changes), logs=folder / "logs_again")
    assert_same_run(again, expected=run)
    for role in sorted(path.parent.name for path in (run / LAST).glob("*/checkpoint.json")):
        names = [f"{role}/{part}" for part in ("weights", "optimizer")]
        for name in names:
            ours, theirs = (
                {p.name: p.read_bytes() for p in (f / LAST / name).glob("*.distcp")}
                for f in (again, run)
            )
            assert ours == theirs, name
    return run


@pytest.fixture(scope="module")
def qwen(files: Path) -> Path:
    """A Qwen2 of 2 layers with the tokenizer of the Llama of 4."""
    path = files / "qwen2"
    if not path.exists():
        torch.manual_seed(4)
        Qwen2ForCausalLM(
            Qwen2Config(
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=2,
                vocab_size=64,
                hidden_size=48,
                intermediate_size=80,
                num_hidden_layers=2,
                num_attention_heads=3,
                num_key_value_heads=1,
                max_position_embeddings=64,
            )
        ).save_pretrained(path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(files / "model" / name, path / name)
    return path


def test_a_smaller_critic_of_another_family_and_layout(files, qwen, tmp_path):
    run = run_and_resume(
        files,
        tmp_path,
        critic__model=qwen,
        actor__parallel__tensor_model_parallel_size=2,
        actor__parallel__pipeline_model_parallel_size=1,
        critic__parallel__tensor_model_parallel_size=1,
        critic__parallel__pipeline_model_parallel_size=2,
    )
    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["grad_norm/critic"] > 0 for line in lines)
    assert lines[-1]["critic/value_loss"] != lines[0]["critic/value_loss"]
    found = exported(run / LAST, role="critic", output=tmp_path / "critic")
    assert exported(run / LAST, role="actor", output=tmp_path / "actor") == weights(run)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert type(model).__name__ == "Qwen2ForSequenceClassification"
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (2, 48)
    assert model.num_labels == 1 and bool(model.score.weight.any())
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert (tmp_path / "critic/tokenizer.json").is_file()


def test_another_tokenizer_of_the_same_size_is_refused(files, qwen, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(qwen, other)
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["t5"], vocabulary["t9"] = vocabulary["t9"], vocabulary["t5"]
    path.write_text(json.dumps(content))
    words = settings(
        files,
        output=tmp_path / "run",
        critic__model=other,
        critic__parallel__tensor_model_parallel_size=1,
    )
    job = Job(words, logs=tmp_path / "refused")
    assert job.wait() == [2] * 4, job.text()
    assert job.text().count("error: ") == 1
    assert f"critic.model={other}: its tokenizer must equal that of actor.model=" in job.text()
    assert "the token 't5' has the id 8, and there has the id 12" in job.text()
    assert not (tmp_path / "run").exists()


def test_a_shared_backbone_resumes_and_exports(files, tmp_path):
    run = run_and_resume(
        files,
        tmp_path,
        critic__shared_backbone="true",
        critic__optimizer__learning_rate=5e-6,  # the default: the head has the actor's optimizer
        reshard__verify="always",
    )
    lines = metrics(run)
    for line in lines:
        assert line["critic/value_loss"] > 0 and line["critic/explained_variance"] <= 1
        assert not OF_A_CRITIC & line.keys()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = {key for line in records for key in line if key.startswith("time/")}
    assert not {"time/value_seconds", "time/update_critic_seconds"} & timed
    assert "time/log_prob_seconds" in timed
    assert not (run / LAST / "critic").exists()
    manifest = json.loads((run / LAST / "actor/checkpoint.json").read_text())
    assert manifest["head"] == "joint"
    assert "language model with a value head" in tool(
        "inspect_checkpoint", run / LAST, logs=tmp_path / "logs_inspect"
    )
    # The actor: what the run exported, without the head.
    actor = exported(run / LAST, role="actor", output=tmp_path / "actor")
    assert actor == weights(run) and "score.weight" not in actor
    # The critic: its backbone, and the head.
    critic = exported(run / LAST, role="critic", output=tmp_path / "critic")
    head = critic.pop("score.weight")
    assert np.frombuffer(head, dtype=np.float32).any()
    assert critic == {name: value for name, value in actor.items() if name != "lm_head.weight"}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert model.num_labels == 1
    assert model.score.weight.detach().numpy().tobytes() == head
    # At another layout both heads are there.
    tool("convert_checkpoint", "--checkpoint", run / LAST, "--output", tmp_path / "tp1",
         "--tensor-parallel", 1, "--pipeline-parallel", 1, logs=tmp_path / "logs_tp1")  # fmt: skip
    again = exported(tmp_path / "tp1", role="critic", output=tmp_path / "critic_again")
    assert again == critic | {"score.weight": head}


def test_a_checkpoint_of_two_models_is_no_shared_one(files, whole, tmp_path):
    words = settings(
        files,
        output=tmp_path / "run",
        checkpoint__resume=whole / "checkpoints/step_000005",
        critic__shared_backbone="true",
        critic__optimizer__learning_rate=5e-6,
    )
    job = Job(words, logs=tmp_path / "refused")
    assert job.wait() == [2] * 4, job.text()
    assert "critic.shared_backbone: False -> True" in job.text()
