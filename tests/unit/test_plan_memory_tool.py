"""The command line of the memory planner, and its table in a dry run."""

import json
from pathlib import Path

import pytest
from test_tools_data import tool

from rlhf_megatron import cli, memory_report
from rlhf_megatron.config import Config, RunConfig
from rlhf_megatron.dry_run import describe
from rlhf_megatron.memory.report import PASS_KINDS
from rlhf_megatron.memory_report import planned_peaks, suggested
from rlhf_megatron.observability.report_data import read_runs
from rlhf_megatron.validation import load_and_validate

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "ppo_70b_32gpu.yaml")
MODEL = f"actor.model={ROOT}/configs/models/Llama-3.3-70B"
SMALL = f"actor.model={ROOT}/configs/models/Llama-3.2-1B"


def run(capsys, *words: str) -> tuple[int, str]:
    code = tool("plan_memory").main(["--config", CONFIG, MODEL, *words])
    found = capsys.readouterr()
    return code, found.out + found.err


def test_the_table_of_a_plan_that_fits(capsys):
    code, text = run(capsys)
    assert code == 0
    assert "32 GPUs of 80 GB" in text  # the least that the layout takes
    assert "fits, with" in text
    assert "does not fit" not in text
    assert "what would help" not in text
    for phase in ("setup", "rollout", "update_actor", "reshard", "checkpoint"):
        assert f"    {phase} " in text
    rows = [line.split() for line in text.splitlines() if line.startswith("    update_actor")]
    *cells, total = (float(cell) for cell in rows[0][1:8])
    assert sum(cells) == pytest.approx(total, abs=0.04)


def test_a_plan_that_does_not_fit_says_why_and_what_would_help(capsys):
    code, text = run(capsys, "--gpu-memory-gb", "40")
    assert code == 1
    assert "does not fit: setup needs" in text or "does not fit: update" in text
    assert "cost:" in text


def test_json_holds_bytes_that_add_up(capsys):
    code, text = run(capsys, "--json", "--world-size", "64", "--host-memory-gb", "2000")
    assert code == 0
    found = json.loads(text)
    assert found["world_size"] == 64
    assert found["fits"] is True
    assert found["engine"]["sequences_at_once"] > 100
    assert sorted(rank for group in found["ranks"] for rank in group["ranks"]) == list(range(64))
    totals = []
    for group in found["ranks"]:
        for phase in group["phases"]:
            assert phase["total_bytes"] == sum(item["bytes"] for item in phase["items"])
            assert 0 < phase["allocated_bytes"] < phase["total_bytes"]
            totals.append(phase["total_bytes"])
        kinds = {item["kind"] for phase in group["phases"] for item in phase["items"]}
        assert {"weights", "gradients", "optimizer", "kv_cache", *PASS_KINDS} - kinds <= {
            "recomputed",
            "logits",
            "activations",
        }
    assert found["peak"]["total_bytes"] == max(totals)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--world-size", "0"], "--world-size 0"),
        (["--gpu-memory-gb", "-1"], "--gpu-memory-gb -1.0"),
        (["--world-size", "12"], "must divide the 12 ranks"),
        (["actor.offload_moments=true"], "did you mean actor.offload_"),
    ],
)
def test_bad_usage_is_refused_in_one_message(capsys, words, message):
    code, text = run(capsys, *words)
    assert code == 2
    assert message in text


def test_a_host_that_is_too_small_is_no_fit(capsys):
    code, text = run(capsys, "--host-memory-gb", "512")
    assert code == 1
    assert "a node needs" in text


def test_it_is_a_subcommand():
    assert (ROOT / "tools" / f"{cli.TOOLS['plan-memory']}.py").is_file()


def test_a_dry_run_shows_the_table():
    config = load_and_validate([CONFIG], overrides=[MODEL], world_size=32, check_paths=False)
    text = describe(config, world_size=32, gpu_memory_gb=40)
    assert "update_actor" in text
    assert "does not fit" in text
    assert "of 40 GB" in text


def test_the_message_of_a_run_out_of_memory_has_plan_and_suggestions(monkeypatch):
    """On this machine's device: a CPU has a plan, and changes that lower a phase's peak."""
    words = [SMALL, "actor.recompute.granularity=none"]
    words += [f"{role}.parallel.{key}=1" for role in ("actor", "critic", "ref") for key in SIZES]
    words += [f"{role}.parallel.sequence_parallel=false" for role in ("actor", "critic", "ref")]
    words += ["rollout.tensor_parallel_size=1"]
    config = load_and_validate([CONFIG], overrides=words, world_size=1, check_paths=False)
    peaks = planned_peaks(config, world_size=1)
    assert peaks["update_actor"] > peaks["log_prob"] > 10
    lines = suggested(config, phase="update_actor", world_size=1)
    assert any(line.startswith("actor.recompute.granularity=full") for line in lines)
    assert all(" GB less; " in line for line in lines)


SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")


def test_the_plan_of_a_run_on_gpus_lies_beside_its_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report reads it; on a CPU there is none."""
    monkeypatch.setattr(memory_report, "planned_peaks", lambda config, *, world_size: {"value": 2})
    config = Config(run=RunConfig(output_dir=str(tmp_path)))
    memory_report.write_planned_peaks(config, world_size=1)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(memory_report, "on_gpu", lambda: True)
    (tmp_path / "metrics.jsonl").write_text("")
    memory_report.write_planned_peaks(config, world_size=1)
    (run,) = read_runs([tmp_path])
    assert run.planned_gb == {"value": 2.0}
