"""After a sync vLLM answers as transformers does with the exported weights, family by family."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from synced_actor import CPU, build_synced, new_factory
from tiny_models import EOS, KINDS, greedy_oracle, make_prompts, save_config
from transformers import AutoModelForCausalLM

from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.rollout.contract import Prompt, SamplingParameters

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

CHECKED = ("llama", "one_kv_head_tied", "mistral", "qwen2", "qwen3")
# Two engines of one rank fed by a pipeline, one of two ranks fed by tensor-parallel ranks.
CASES = {
    1: (ParallelLayout((0, 1), 1, 2), [(0,), (1,)]),
    2: (ParallelLayout((0, 1), 2, 1), [(0, 1)]),
}
GREEDY = SamplingParameters(
    temperature=0.0, max_response_tokens=16, responses_per_prompt=1, stop_token_ids=(EOS,)
)


def prompts_of(kind: str) -> list[Prompt]:
    """Two are longer than a cache block of 32 tokens: of one, and of three."""
    return make_prompts(KINDS[kind]["vocab_size"], lengths=[4, 5, 6, 7, 8, 2, 40, 100])


def exported_rank(rank: int, scratch: Path, *, tensor_parallel_size: int) -> dict[str, Any]:
    layout, engines = CASES[tensor_parallel_size]
    factory = new_factory()
    from rlhf_megatron.checkpoint.hf_write import export_hf
    from rlhf_megatron.rollout.worlds import make_engine_groups

    engine_groups = make_engine_groups(engines, device=CPU)
    found: dict[str, Any] = {}
    for kind in CHECKED:
        directory = save_config(kind, scratch / f"{kind}_{rank}")
        synced = build_synced(
            rank,
            directory=directory,
            layout=layout,
            engines=engines,
            engine_groups=engine_groups,
            factory=factory,
            config=RolloutConfig(max_num_seqs=16, tensor_parallel_size=tensor_parallel_size),
        )
        synced.write_actor(rank, kind=kind, seed=3)
        synced.sync.run(version=1)
        batch = synced.engine.generate(prompts_of(kind), sampling=GREEDY, step=1)
        found[kind] = [batch.response_tokens(i) for i in range(len(batch))]
        export_hf(
            scratch / f"export_{kind}",
            arch=synced.arch,
            head="lm",
            layouts=synced.layouts,
            parameters=synced.actor.parameters(),
            rank=rank,
            group=dist.group.WORLD,
            template_dir=scratch / f"{kind}_0",
            dtype=torch.float32,
        )
    return found


@pytest.fixture(scope="module", params=CASES)
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run_ranks
) -> tuple[Path, list[dict[str, Any]]]:
    scratch = tmp_path_factory.mktemp("export")
    target = partial(exported_rank, tensor_parallel_size=request.param)
    return scratch, run_ranks(target, world_size=2, scratch=scratch)


@pytest.mark.parametrize("kind", CHECKED)
def test_greedy_equals_transformers_on_the_exported_weights(answers, kind) -> None:
    scratch, results = answers
    model = AutoModelForCausalLM.from_pretrained(scratch / f"export_{kind}", dtype=torch.float32)
    expected = [greedy_oracle(model.eval(), prompt=p, tokens=16) for p in prompts_of(kind)]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert [result[kind] for result in results] == [expected, expected]
