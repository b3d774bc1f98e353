"""The memory benchmark with fewer syncs: what it measures is what stays flat."""

import importlib.util
import json
import os
from argparse import Namespace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "sync_memory.py"
SYNCS = int(os.environ.get("RLHF_MEGATRON_SYNCS", "16"))
"""200 are the benchmark's default."""
WARMUP = 8

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def benchmark() -> Any:
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("sync_memory", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measured_rank(rank: int, scratch: Path, *, model: Path, weight_update: str) -> list[int]:
    return benchmark().measure(rank, model=model, syncs=SYNCS, weight_update=weight_update)


# The reload allocates every tensor anew, and packs it anew: its memory goes up and down.
@pytest.mark.parametrize(("weight_update", "percent"), [("auto", 1.0), ("reload", 5.0)])
def test_memory_stays_flat_over_syncs_with_rollouts(
    run_ranks, tmp_path: Path, weight_update: str, percent: float
) -> None:
    module = benchmark()
    (tmp_path / "config.json").write_text(json.dumps(module.SETTINGS))
    target = partial(measured_rank, model=tmp_path, weight_update=weight_update)
    resident_bytes = run_ranks(target, world_size=2, scratch=tmp_path / "ranks")
    options = Namespace(
        syncs=SYNCS,
        warmup=WARMUP,
        weight_update=weight_update,
        bound=percent,
        json=tmp_path / "figures.json",
    )
    result = {"seconds": 0.0, "resident_bytes": resident_bytes}
    assert module.report(result, options=options) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["worst_percent"] <= percent
    # A model's weights are 5 % of a process: a sync that leaves as much behind shows at once.
    assert all(rank["base_bytes"] < 1.5e9 for rank in figures["ranks"])
