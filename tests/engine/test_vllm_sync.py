"""From a Megatron actor into vLLM engines through WeightSync: greedy tokens after each sync."""

from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_ranks import run_ranks
from tiny_models import EOS, KINDS, greedy_oracle, make_model, make_prompts, save_config

from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.layout.megatron import megatron_layouts
from rlhf_megatron.layout.parallel import ParallelLayout
from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.rollout.contract import Prompt, SamplingParameters

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

CPU = torch.device("cpu")
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


def synced_rank(rank: int, scratch: Path, *, names: tuple[str, ...]) -> dict[str, Any]:
    from rlhf_megatron.distributed.cpu_platform import use_cpu_in_place_of_cuda

    use_cpu_in_place_of_cuda()
    from rlhf_megatron.distributed.groups import GroupFactory

    factory = GroupFactory(timeout_seconds=60)
    directory = save_config(KIND, scratch / f"model_{rank}")
    return {
        name: sync_and_generate(
            rank, layout=layout, engines=engines, directory=directory, factory=factory
        )
        for name, (layout, engines) in PLACEMENTS.items()
        if name in names
    }


def sync_and_generate(
    rank: int,
    *,
    layout: ParallelLayout,
    engines: list[tuple[int, ...]],
    directory: Path,
    factory: Any,
) -> dict[str, Any]:
    from rlhf_megatron.distributed.groups import build_role_groups
    from rlhf_megatron.layout.vllm import vllm_layouts
    from rlhf_megatron.models.build import build_model
    from rlhf_megatron.reshard.config import ReshardConfig
    from rlhf_megatron.rollout.factory import build_engine, resolve_engine
    from rlhf_megatron.rollout.vllm_fit import level_group_count
    from rlhf_megatron.rollout.worlds import make_engine_groups
    from rlhf_megatron.weight_sync import SplitActor, WeightSync

    arch = read_architecture(directory)
    groups = build_role_groups("actor", layout=layout, factory=factory)
    actor = None
    if groups is not None:
        actor = build_model(
            arch, head="lm", groups=groups, precision="fp32", layer_spec_name="local", device=CPU,
            seed=1,
        )  # fmt: skip
    resolve_engine("vllm", device=CPU)
    engine = None
    for replica, (ranks, group) in enumerate(
        zip(engines, make_engine_groups(engines, device=CPU), strict=True)
    ):
        if rank in ranks:
            engine = build_engine(
                "vllm", model_dir=directory, ranks=ranks, replica=replica, group=group,
                config=RolloutConfig(max_num_seqs=16, tensor_parallel_size=len(ranks)),
                dtype="float32", run_seed=5, max_model_len=128, device=CPU,
            )  # fmt: skip
    level_group_count()
    layouts = megatron_layouts(arch, parallel=layout, head="lm", fused_norms=False)
    sync = WeightSync(
        actor, engine=engine, engine_layouts=vllm_layouts(arch, engines=engines),
        dtype=torch.float32, config=ReshardConfig(bucket_mb=0.1, verify="always"), rank=rank,
        job_group=dist.group.WORLD, device=CPU, node_of=lambda _: 0,
        split=SplitActor(arch=arch, layouts=layouts),
    )  # fmt: skip
    found: dict[str, Any] = {"tokens": [], "versions": [], "bytes": []}
    for version in range(1, NUM_SYNCS + 1):
        if actor is not None:
            state = make_model(KIND, seed=version).state_dict()
            parameters = actor.parameters()
            with torch.no_grad():
                for place in layouts[rank]:
                    value = state[place.tensor][place.box.slices()]
                    parameters[place.parameter][place.region(place.box)] = value
        report = sync.run(version=version)
        found["bytes"].append((report.bytes_received, report.bytes_minimum))
        if engine is not None:
            batch = engine.generate(prompts(), sampling=GREEDY, step=version)
            found["tokens"].append([batch.response_tokens(i) for i in range(len(batch))])
            found["versions"].append(set(batch.sample["weight_versions"].tolist()))
    later = dist.new_group([0, 1, 3])
    value = torch.tensor([float(rank)])
    if rank in (0, 1, 3):
        dist.all_reduce(value, group=later)
    found["later"] = value.item()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Per rank, by placement. The two with the actor on all ranks share their processes."""
    *whole, apart = PLACEMENTS
    found: list[dict[str, Any]] = [{} for _ in range(4)]
    for names in (tuple(whole), (apart,)):
        scratch = tmp_path_factory.mktemp("sync")
        target = partial(synced_rank, names=names)
        for rank, result in enumerate(run_ranks(target, world_size=4, scratch=scratch)):
            found[rank] |= result
    return found


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    models = [make_model(KIND, seed=version) for version in range(1, NUM_SYNCS + 1)]
    return [[greedy_oracle(m, prompt=p, tokens=TOKENS) for p in prompts()] for m in models]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_greedy_equals_transformers_after_each_sync(results, expected, name) -> None:
    assert all(a != b for a, b in pairwise(expected))
    rolling = {rank for engine in PLACEMENTS[name][1] for rank in engine}
    for rank, result in enumerate(results):
        found = result[name]
        assert found["tokens"] == (expected if rank in rolling else [])
        if rank in rolling:
            assert found["versions"] == [{version} for version in range(1, NUM_SYNCS + 1)]
        assert all(received == minimum > 0 for received, minimum in found["bytes"])


@pytest.mark.parametrize("name", PLACEMENTS)
def test_groups_made_after_the_syncs_work(results, name) -> None:
    assert [result[name]["later"] for result in results] == [4.0, 4.0, 2.0, 4.0]
