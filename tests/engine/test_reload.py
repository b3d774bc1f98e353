"""Engines that lay their weights out in a way of their own take them through their own reload.

On a CPU vLLM packs every linear layer for oneDNN unless it is kept from it, and leaves an empty
`weight` behind: a re-layout of the kind that quantised engines do.
"""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from synced_actor import CPU, build_synced, new_factory
from tiny_models import EOS, KINDS, greedy_oracle, make_model, make_prompts, save_config

from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.rollout.contract import SamplingParameters

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

KIND = "llama"
NUM_SYNCS = 3
# The actor on rank 0, the engine on two ranks, one of which has no actor.
LAYOUT, ENGINES = ParallelLayout((0,), 1), [(0, 1)]
GREEDY = SamplingParameters(
    temperature=0.0, max_response_tokens=12, responses_per_prompt=1, stop_token_ids=(EOS,)
)


def prompts_of(kind: str) -> list[Any]:
    return make_prompts(KINDS[kind]["vocab_size"], lengths=[4, 5, 6, 7, 8, 2, 40, 70])


def reloading_rank(rank: int, scratch: Path, *, packed: bool, kinds: list[str]) -> dict[str, Any]:
    factory = new_factory()
    from contextlib import nullcontext

    from rlhf_megatron.rollout import vllm_fit
    from rlhf_megatron.rollout.worlds import make_engine_groups

    groups = make_engine_groups(ENGINES, device=CPU)
    if packed:  # the packing happens, and nothing has asked for the reload
        vllm_fit.plain_cpu_linears = nullcontext
    config = RolloutConfig(
        max_num_seqs=16, tensor_parallel_size=2, weight_update="auto" if packed else "reload"
    )
    found: dict[str, Any] = {}
    for kind in kinds:
        synced = build_synced(
            rank,
            directory=save_config(kind, scratch / f"{kind}_{rank}"),
            layout=LAYOUT,
            engines=ENGINES,
            engine_groups=groups,
            factory=factory,
            config=config,
        )
        found[kind] = {"tokens": [], "bytes": [], "line": str(synced.sync)}
        for version in range(1, NUM_SYNCS + 1):
            synced.write_actor(rank, kind=kind, seed=version)
            report = synced.sync.run(version=version)
            found[kind]["bytes"].append((report.bytes_received, report.bytes_minimum))
            batch = synced.engine.generate(prompts_of(kind), sampling=GREEDY, step=version)
            found[kind]["tokens"].append([batch.response_tokens(i) for i in range(len(batch))])
    if not packed:
        found["failure"] = failure_of_rank_1(rank, synced)
    return found


def failure_of_rank_1(rank: int, synced: Any) -> str:
    """What both ranks hear when rank 1's engine stops in the middle of the tensors."""

    def stop(tensors: Any) -> None:
        next(tensors)
        raise KeyError("no such tensor here")

    if rank == 1:
        synced.engine.load_weights = stop
    try:
        synced.sync.run(version=9)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("packed", "kinds"), [(True, ["llama"]), (False, ["llama", "one_kv_head_tied", "qwen3"])]
)
def test_greedy_equals_transformers_after_each_reload(run_ranks, tmp_path, packed, kinds) -> None:
    target = partial(reloading_rank, packed=packed, kinds=kinds)
    results = run_ranks(target, world_size=2, scratch=tmp_path)
    for kind in kinds:
        models = [make_model(kind, seed=version) for version in range(1, NUM_SYNCS + 1)]
        expected = [
            [greedy_oracle(m, prompt=p, tokens=12) for p in prompts_of(kind)] for m in models
        ]
        whole_bytes = sum(p.numel() * 4 for p in models[0].parameters())
        for result in results:
            assert result[kind]["tokens"] == expected
            # Rank 1 holds nothing and receives the model once; rank 0 has it.
            assert result[kind]["bytes"] == [(whole_bytes, whole_bytes)] * NUM_SYNCS
            assert "own reload" in result[kind]["line"]
    if packed:
        assert "qkv_proj.weight has shape (0,)" in results[0]["llama"]["line"]
    else:
        assert len({result["failure"] for result in results}) == 1
        assert "ranks [1]: KeyError: 'no such tensor here'" in results[0]["failure"]
