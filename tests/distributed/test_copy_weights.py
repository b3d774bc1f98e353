"""Weights between roles and into engines, whatever the layouts, against transformers."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks
from roles import CPU, Shape, build_role, micro_batches, new_factory
from small_models import make_batch, make_model
from torch import Tensor

from rlhf_megatron.checkpoint.hf_write import export_hf
from rlhf_megatron.engine.model_engine import LossResult, ModelEngine
from rlhf_megatron.layout.hf import hf_layout
from rlhf_megatron.models.build import JOINT_HEAD, LM_HEAD, VALUE_HEAD
from rlhf_megatron.models.config import OptimizerConfig
from rlhf_megatron.placed_role import placed
from rlhf_megatron.reshard.config import ReshardConfig
from rlhf_megatron.rollout.config import RolloutConfig
from rlhf_megatron.rollout.contract import Prompt, SamplingParameters
from rlhf_megatron.rollout.hf import HfEngine
from rlhf_megatron.weight_sync import WeightSync, copy_weights

FOUR = Shape(tp=2, pp=2)
PROMPTS = [Prompt(prompt_id=i, token_ids=tuple(range(5 * i, 6 * i + 3))) for i in range(6)]
NEW_TOKENS = 8


def copied(rank: int, models: Path, kind: str, target: Shape, head: str) -> dict[str, Tensor]:
    """Copy a role's weights into a role of other layout; what the target then holds, by box."""
    factory = new_factory()
    source = build_role(models / kind, shape=FOUR, factory=factory)
    target_engine = build_role(
        models / kind, shape=target, factory=factory, head=head, seed=9, load=False
    )
    other = target_engine.model
    parameters = other.parameters()
    if head == VALUE_HEAD and other.groups.is_last_stage:
        parameters["output_layer.weight"].fill_(0.5)
    copy_weights(
        placed(source),
        target=placed(target_engine),
        rank=rank,
        group=dist.group.WORLD,
        device=CPU,
    )
    covered = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in parameters.items()}
    wanted = make_model(kind).state_dict() | {"score.weight": torch.full((1, 64), 0.5)}
    for place in other.rank_layout(rank):
        region = place.region(place.box)
        held = parameters[place.parameter][region]
        assert torch.equal(held, wanted[place.tensor][place.box.slices()]), place
        covered[place.parameter][region] = True
    return {name: parameters[name][~mask] for name, mask in covered.items()}


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen2"])
@pytest.mark.parametrize(
    ("target", "head"),
    [
        (Shape(dp=4), LM_HEAD),
        (Shape(tp=4, sp=True), VALUE_HEAD),
        (Shape(pp=2, dp=2, order=("pp", "tp", "dp")), LM_HEAD),
        (Shape(pp=2, dp=2), VALUE_HEAD),
    ],
    ids=["lm_dp4", "value_tp4sp", "lm_pp2dp2_pp_fastest", "value_pp2dp2"],
)
def test_a_role_takes_the_weights_of_another(models, kind, target, head):
    ranks = run_ranks(4, copied, models, kind, target, head)
    rest = [values for outside in ranks for values in outside.values()]
    assert not any(values.any() for values in rest)  # padding stays 0
    tables = 2 if head == LM_HEAD and (kind != "tied" or target.pp > 1) else 1
    assert sum(values.numel() for values in rest) == target.dp * tables * (192 - 131) * 64


def one_update(engine: ModelEngine) -> None:
    """Move the weights far enough to change what greedy decoding says."""
    batch = make_batch((3, 4), response_lengths=(6, 5))

    def loss(hidden: Tensor, micro) -> LossResult:
        found = engine.log_probs(hidden, micro_batch=micro, temperature=1.0)
        return LossResult(loss_sum=-found.logprobs.sum(), count=torch.tensor(11))

    micros = micro_batches(engine, batch, samples_by_replica=[[[0, 1]]])
    engine.train_step(micros, loss=loss, learning_rate=0.02)


def synced(rank: int, models: Path, kind: str, exported: Path) -> list[dict[str, list]]:
    """Greedy responses after the first sync, and after an update and a second one."""
    factory = new_factory()
    actor = build_role(
        models / kind, shape=FOUR, factory=factory, optimizer=OptimizerConfig(learning_rate=0.02)
    )
    engine = None
    if rank != 1:  # which does not roll out
        engine = HfEngine(
            models / kind,
            config=RolloutConfig(),
            ranks=(rank,),
            replica=rank,
            dtype="float32",
            run_seed=0,
            max_model_len=64,
            device=CPU,
        )
    sync = WeightSync(
        placed(actor),
        engine=engine,
        engine_layouts={r: hf_layout(actor.model.arch, head="lm") for r in (0, 2, 3)},
        config=ReshardConfig(bucket_mb=0.1, verify="always"),
        rank=rank,
        group=dist.group.WORLD,
        device=CPU,
        node_of=lambda _: 0,
    )
    sampling = SamplingParameters(
        temperature=0.0, max_response_tokens=NEW_TOKENS, responses_per_prompt=1, stop_token_ids=()
    )
    found = []
    for version in (1, 2):
        if version == 2:
            one_update(actor)
        report = sync.run(version=version)
        answers: dict[str, list] = {"bytes": [report.bytes_received, report.bytes_minimum]}
        if engine is not None:
            batch = engine.generate(PROMPTS, sampling=sampling, step=version)
            answers["tokens"] = [batch.response_tokens(i) for i in range(len(batch))]
            answers["versions"] = batch.sample["weight_versions"].tolist()
        found.append(answers)
    export_hf(
        exported,
        arch=actor.model.arch,
        head=LM_HEAD,
        layouts=placed(actor).layouts,
        parameters=actor.model.parameters(),
        rank=rank,
        group=dist.group.WORLD,
        template_dir=models / kind,
        dtype=torch.float32,
        overwrite=True,
    )
    return found


def written_bytes(rank: int, models: Path, head: str) -> tuple[dict[str, bytes], list[int]]:
    """What the engine of this rank holds after a sync from an actor that ends in `head`."""
    actor = build_role(models / "tied", shape=FOUR, factory=new_factory(), head=head)
    if head == JOINT_HEAD and actor.model.groups.is_last_stage:
        with torch.no_grad():
            actor.model.parameters()["output_layer.value_head.weight"].fill_(3.0)
    engine = HfEngine(
        models / "tied",
        config=RolloutConfig(),
        ranks=(rank,),
        replica=rank,
        dtype="float32",
        run_seed=0,
        max_model_len=64,
        device=CPU,
    )
    layouts = {r: hf_layout(actor.model.arch, head="lm") for r in range(4)}
    sync = WeightSync(
        placed(actor),
        engine=engine,
        engine_layouts=layouts,
        config=ReshardConfig(verify="always"),
        rank=rank,
        group=dist.group.WORLD,
        device=CPU,
        node_of=lambda _: 0,
    )
    report = sync.run(version=1)
    held = {n: p.detach().numpy().tobytes() for n, p in engine.parameters().items()}
    return held, [report.own_bytes_received, report.bytes_received, report.bytes_minimum]


def test_a_value_head_beside_the_output_layer_is_not_offered_to_the_engines(models):
    assert run_ranks(4, written_bytes, models, JOINT_HEAD) == run_ranks(
        4, written_bytes, models, LM_HEAD
    )


def greedy(rank: int, directory: Path) -> list[list[int]]:
    """transformers' own decoding of a directory, prompt by prompt."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt.token_ids])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=[-1],
            pad_token_id=0,
        )
        answers.append(output[0, ids.size(1) :].tolist())
    return answers


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_engines_answer_as_transformers_with_the_actors_weights(models, tmp_path, kind):
    ranks = run_ranks(4, synced, models, kind, tmp_path / "exported")
    expected = [
        run_ranks(1, greedy, folder)[0] for folder in (models / kind, tmp_path / "exported")
    ]
    assert expected[0] != expected[1]
    for rank, versions in enumerate(ranks):
        for version, (found, answers) in enumerate(zip(versions, expected, strict=True), start=1):
            received, minimum = found["bytes"]
            assert received == minimum > 0
            assert ("tokens" in found) == (rank != 1)
            if rank != 1:
                assert found["tokens"] == answers
                assert found["versions"] == [version] * len(PROMPTS)
