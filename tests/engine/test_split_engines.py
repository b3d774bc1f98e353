"""Engines on chosen ranks of four, the actor on all or on the others: each sync reaches them."""

from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from synced_actor import CPU, build_synced, new_factory
from tiny_models import EOS, KINDS, greedy_oracle, make_model, make_prompts, save_config

from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.rollout.contract import Prompt, SamplingParameters

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

KIND = "llama"
NUM_SYNCS = 5
TOKENS = 12
FOUR = ParallelLayout((0, 1, 2, 3), 2, 2)
PLACEMENTS = {
    "every other rank": (FOUR, [(0, 2), (1, 3)]),
    "consecutive ranks": (FOUR, [(0, 1), (2, 3)]),
    "apart from the actor": (ParallelLayout((0, 1), 2), [(2, 3)]),
}
GREEDY = SamplingParameters(
    temperature=0.0, max_response_tokens=TOKENS, responses_per_prompt=1, stop_token_ids=(EOS,)
)


def prompts() -> list[Prompt]:
    """Also one longer than a cache block of 32 tokens, and one longer than two."""
    return make_prompts(KINDS[KIND]["vocab_size"], lengths=[4, 5, 6, 7, 8, 3, 40, 70])


def synced_rank(rank: int, scratch: Path, *, name: str) -> dict[str, Any]:
    layout, engines = PLACEMENTS[name]
    factory = new_factory()
    from rlhf_megatron.rollout.worlds import make_engine_groups

    synced = build_synced(
        rank,
        directory=save_config(KIND, scratch / f"model_{rank}"),
        layout=layout,
        engines=engines,
        engine_groups=make_engine_groups(engines, device=CPU),
        factory=factory,
        config=RolloutConfig(max_num_seqs=16, tensor_parallel_size=2),
    )
    found: dict[str, Any] = {"tokens": [], "versions": [], "bytes": [], "sums": []}
    for version in range(1, NUM_SYNCS + 1):
        synced.write_actor(rank, kind=KIND, seed=version)
        report = synced.sync.run(version=version)
        found["bytes"].append((report.bytes_received, report.bytes_minimum))
        if synced.engine is not None:
            batch = synced.engine.generate(prompts(), sampling=GREEDY, step=version)
            found["tokens"].append([batch.response_tokens(i) for i in range(len(batch))])
            found["versions"].append(set(batch.sample["weight_versions"].tolist()))
        found["sums"].append(sum_over_new_group(rank))
    return found


def sum_over_new_group(rank: int) -> float:
    """Of the ranks + 1, over a group made now; a rank outside keeps its own."""
    group = dist.new_group([0, 1, 3])
    value = torch.tensor([rank + 1.0])
    if rank in (0, 1, 3):
        dist.all_reduce(value, group=group)
    return value.item()


# vLLM's groups belong to the process, so each placement has processes of its own.
@pytest.fixture(scope="module", params=PLACEMENTS)
def placed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_ranks
) -> tuple[str, list[dict[str, Any]]]:
    target = partial(synced_rank, name=request.param)
    scratch = tmp_path_factory.mktemp("sync")
    return request.param, run_ranks(target, world_size=4, scratch=scratch)


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    models = [make_model(KIND, seed=version) for version in range(1, NUM_SYNCS + 1)]
    found = [[greedy_oracle(m, prompt=p, tokens=TOKENS) for p in prompts()] for m in models]
    assert all(a != b for a, b in pairwise(found))
    return found


def test_greedy_equals_transformers_after_each_sync(placed, expected) -> None:
    name, results = placed
    rolling = {rank for engine in PLACEMENTS[name][1] for rank in engine}
    for rank, found in enumerate(results):
        assert found["tokens"] == (expected if rank in rolling else [])
        if rank in rolling:
            assert found["versions"] == [{version} for version in range(1, NUM_SYNCS + 1)]
        assert all(received == minimum > 0 for received, minimum in found["bytes"])


def test_groups_made_between_the_syncs_work(placed) -> None:
    _, results = placed
    assert [result["sums"] for result in results] == [
        [value] * NUM_SYNCS for value in (7.0, 7.0, 3.0, 7.0)
    ]
