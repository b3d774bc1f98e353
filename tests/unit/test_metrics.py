"""metrics.jsonl, the trackers, rollouts and logs, read back from the files they leave."""

import json
import logging
import math
import sys

import pytest
import torch

from rlhf_megatron.errors import UserError
from rlhf_megatron.observability.config import LoggingConfig, WandbConfig
from rlhf_megatron.observability.logs import setup_logging
from rlhf_megatron.observability.metrics import MetricsWriter
from rlhf_megatron.observability.rollouts import RolloutRow, write_rollouts


def writer(folder, config=None):
    return MetricsWriter(
        folder, config=config or LoggingConfig(), run_name="test", resolved_config={"run": {"a": 1}}
    )


def read_lines(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_one_object_a_step_readable_at_once(tmp_path):
    metrics = writer(tmp_path / "run")
    metrics.write(1, metrics={"reward/mean": torch.tensor(0.5), "reshard/bytes_received": 2**60})
    assert read_lines(tmp_path / "run/metrics.jsonl") == [
        {"step": 1, "reward/mean": 0.5, "reshard/bytes_received": 2**60}
    ]
    metrics.write(2, metrics={"reward/mean": 0.75})
    metrics.close()
    metrics.close()
    assert [line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")] == [1, 2]
    assert not (tmp_path / "run/tensorboard").exists()


def test_a_resumed_run_appends(tmp_path):
    for step in (1, 2):
        metrics = writer(tmp_path)
        metrics.write(step, metrics={})
        metrics.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_nonfinite_figures_keep_their_key(tmp_path):
    metrics = writer(tmp_path)
    metrics.write(1, metrics={"a": math.nan, "b": 1.5, "c": -math.inf, "d": torch.tensor(math.inf)})
    metrics.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": None, "b": 1.5, "c": None, "d": None, "nonfinite": ["a", "c", "d"]}
    ]


def test_tensorboard_events_hold_the_same_figures(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `logging` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = writer(tmp_path, LoggingConfig(tensorboard=True))
    for step, value in ((1, 0.25), (2, math.nan), (3, 0.5)):
        metrics.write(step, metrics={"reward/mean": value})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert found == [(1, 0.25), (3, 0.5)]


def test_wandb_offline_leaves_a_run_in_the_folder(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra `logging` is not installed")
    # Machine statistics and the start of a service take seconds that this test does not need.
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    metrics = writer(tmp_path, LoggingConfig(wandb=WandbConfig(mode="offline", name="named")))
    metrics.write(1, metrics={"reward/mean": 0.25, "kl/mean": math.nan})
    metrics.close()
    (record,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = record.read_bytes()
    assert b"reward/mean" in content and b"named" in content
    assert read_lines(tmp_path / "metrics.jsonl")[0]["reward/mean"] == 0.25


def test_a_resumed_run_is_the_same_run_in_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra `logging` is not installed")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    config = LoggingConfig(wandb=WandbConfig(mode="offline"))
    ids = []
    for step in (1, 2):
        metrics = writer(tmp_path / "run", config)
        ids.append(metrics._wandb.id)
        metrics.write(step, metrics={"reward/mean": 0.25})
        metrics.close()
    other = writer(tmp_path / "other", config)
    ids.append(other._wandb.id)
    other.close()
    assert ids[0] == ids[1] != ids[2]
    records = list((tmp_path / "run/wandb").glob(f"offline-run-*/run-{ids[0]}.wandb"))
    assert len(records) == len(list((tmp_path / "run/wandb").glob("offline-run-*/*.wandb"))) >= 1


def test_missing_trackers_are_reported_together(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    config = LoggingConfig(tensorboard=True, wandb=WandbConfig(mode="offline"))
    with pytest.raises(UserError) as caught:
        writer(tmp_path, config)
    message = str(caught.value)
    assert "logging.tensorboard: true" in message and "logging.tensorboard=false" in message
    assert "logging.wandb.mode: offline" in message and "logging.wandb.mode=off" in message
    assert ".[logging]" in message


def row(**changes):
    fields = {
        "prompt": "2+3=",
        "response": "5",
        "reward": 1.0,
        "truncated": False,
        "prompt_tokens": 4,
        "response_tokens": 2,
        "prompt_id": 7,
        "sample_index": 0,
        "weight_version": 3,
    }
    return RolloutRow(**(fields | changes))


def test_rollouts_round_trip_awkward_text(tmp_path):
    texts = ["", 'line\nbreak "quoted" \\', "日本語 ü", "lone \udc80 surrogate", "\x00\x1b[31m"]
    rows = [row(response=text, sample_index=i) for i, text in enumerate(texts)]
    path = write_rollouts(tmp_path, step=10, rows=rows)
    assert path == tmp_path / "rollouts/step_000010.jsonl"
    found = read_lines(path)
    assert [line["response"] for line in found] == texts
    assert found[0] == {
        "prompt": "2+3=",
        "response": "",
        "reward": 1.0,
        "truncated": False,
        "prompt_tokens": 4,
        "response_tokens": 2,
        "prompt_id": 7,
        "sample_index": 0,
        "weight_version": 3,
    }
    assert "日本語" in path.read_text(encoding="utf-8")
    assert [entry.name for entry in path.parent.iterdir()] == ["step_000010.jsonl"]


def test_rollouts_without_a_reward_and_without_rows(tmp_path):
    path = write_rollouts(tmp_path, step=1, rows=[row(reward=math.nan), row(reward=None)])
    assert [line["reward"] for line in read_lines(path)] == [None, None]
    assert write_rollouts(tmp_path, step=1, rows=[]).read_text() == ""


@pytest.fixture
def package_logger():
    logger = logging.getLogger("rlhf_megatron")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield logger
    for handler in list(logger.handlers):
        if handler not in before[0]:
            logger.removeHandler(handler)
            handler.close()
    logger.setLevel(before[1])
    logger.propagate = before[2]


def test_every_rank_has_a_log_and_rank_0_warns_on_stderr(tmp_path, capsys, package_logger):
    for rank in (0, 3):
        setup_logging(tmp_path, rank=rank)
        child = logging.getLogger("rlhf_megatron.reshard")
        child.info("quiet %d", rank)
        child.warning("loud %d", rank)
        child.debug("hidden %d", rank)
    for rank in (0, 3):
        lines = (tmp_path / f"logs/rank_{rank:04d}.log").read_text().splitlines()
        assert len(lines) == 2
        assert f"rank {rank} INFO rlhf_megatron.reshard: quiet {rank}" in lines[0]
        assert f"rank {rank} WARNING rlhf_megatron.reshard: loud {rank}" in lines[1]
    assert capsys.readouterr().err == "WARNING: loud 0\n"


def test_debug_switch_and_repeated_setup(tmp_path, monkeypatch, package_logger):
    monkeypatch.setenv("RLHF_MEGATRON_DEBUG", "1")
    setup_logging(tmp_path, rank=1)
    count = len(package_logger.handlers)
    setup_logging(tmp_path, rank=1).debug("bytes %d", 5)
    assert len(package_logger.handlers) == count
    assert (tmp_path / "logs/rank_0001.log").read_text().count("DEBUG rlhf_megatron: bytes 5") == 1
