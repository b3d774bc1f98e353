"""The shared backbone: its rules, what it leaves out of plans, and its joint loss."""

from pathlib import Path

import pytest
import torch
from memory_cases import LLAMA_8B, layouts, machine_of, offloaded
from memory_cases import config_of as planner_config

from rlhf_megatron.architectures import Architectures
from rlhf_megatron.config import Config, load_config
from rlhf_megatron.doctor.needs import needs_of
from rlhf_megatron.engine.model_engine import LossResult
from rlhf_megatron.joint_loss import joint_loss
from rlhf_megatron.layout.sizes import num_parameters
from rlhf_megatron.memory.plan import RoleModels, plan_memory
from rlhf_megatron.memory.suggestions import changed, suggest
from rlhf_megatron.resolve import describe_batch
from rlhf_megatron.resume import _changes, _refused, plain_config
from rlhf_megatron.shared_backbone import (
    actor_head,
    refused_shared_backbone,
    shared_loss_weight,
    trained_roles,
)
from rlhf_megatron.validation import validate

ROOT = Path(__file__).parents[2]
SHARED = {
    "critic.shared_backbone": True,
    "critic.recompute.granularity": "none",
}
BYTES_PER_PARAMETER = 2 + 4 + 12
"""Weights, gradients, and the optimizer's, in bf16."""


def test_all_that_makes_no_sense_is_reported_at_once() -> None:
    config = load_config([str(ROOT / "configs/ppo_70b_32gpu.yaml")])
    config.critic.shared_backbone = True
    problems = list(refused_shared_backbone(config))
    named = [problem.split("=")[0] for problem in problems]
    assert named == [
        "critic.recompute.granularity",
        "critic.offload_gradients",
        "critic.offload_optimizer",
        "critic.optimizer.warmup_steps",
        "ppo.critic_warmup_steps",
    ]
    for problem in problems:
        assert "critic.shared_backbone=true" in problem
        assert "set critic.shared_backbone=false" in problem or "or critic.shared" in problem
    assert [p for p in validate(config, world_size=32) if p in problems] == problems


def test_what_equals_the_actors_may_stay() -> None:
    config = planner_config(layouts=layouts(tp=4, pp=2), shared=SHARED)
    config.actor.layer_spec = config.critic.layer_spec = "local"
    assert list(refused_shared_backbone(config)) == []
    config.critic.parallel.tensor_model_parallel_size = 2
    (problem,) = refused_shared_backbone(config)
    assert "critic.parallel.tensor_model_parallel_size=2" in problem
    assert "actor.parallel.tensor_model_parallel_size=4" in problem


@pytest.mark.parametrize("name", ["quickstart_cpu", "ppo_8b_8gpu", "ppo_405b_512gpu"])
def test_the_profile_makes_any_configuration_a_shared_one(name: str) -> None:
    files = [ROOT / f"configs/{name}.yaml", ROOT / "configs/profiles/shared_backbone.yaml"]
    config = load_config([str(file) for file in files])
    assert list(refused_shared_backbone(config)) == []
    assert list(trained_roles(config)) == ["actor"]
    assert actor_head(config) == "joint" and shared_loss_weight(config) == 1.0


def test_two_models_are_as_before() -> None:
    config = Config()
    assert list(trained_roles(config)) == ["actor", "critic"]
    assert actor_head(config) == "lm" and shared_loss_weight(config) is None
    assert list(refused_shared_backbone(config)) == []


def test_the_plan_has_no_critic_and_a_head_more() -> None:
    machine = machine_of(8, gpu_gb=80)
    common = {"layout": layouts(tp=8), "off": offloaded("optimizer")}
    two = plan_memory(
        planner_config(**common),
        models=RoleModels(actor=LLAMA_8B, critic=LLAMA_8B, ref=LLAMA_8B),
        machine=machine,
    )
    config = planner_config(**common, shared=SHARED | {"critic.offload_optimizer": False})
    shared = plan_memory(
        config, models=RoleModels(actor=LLAMA_8B, critic=None, ref=LLAMA_8B), machine=machine
    )
    assert [role.setting.name for role in two.worst.roles] == ["actor", "critic", "ref"]
    assert [role.setting.name for role in shared.worst.roles] == ["actor", "ref"]
    assert {"value", "update_critic"} & {p.phase for p in two.worst.phases}
    assert not {"value", "update_critic"} & {p.phase for p in shared.worst.phases}
    joint, alone = (
        next(role for role in plan.worst.roles if role.setting.name == "actor")
        for plan in (shared, two)
    )
    more = sum(joint.resident.values()) - sum(alone.resident.values())
    # The head is whole on each tensor-parallel rank; buffers are padded to 128 elements.
    assert 0 < more <= BYTES_PER_PARAMETER * (LLAMA_8B.hidden_size + 128)
    assert describe_batch(config, world_size=8).count("TP8 x PP1") == 1
    tight = machine_of(8, gpu_gb=30)
    models = RoleModels(actor=LLAMA_8B, critic=None, ref=LLAMA_8B)
    plan = plan_memory(config, models=models, machine=tight)
    advice = suggest(config, models=models, machine=tight, plan=plan)
    assert advice.single
    for suggestion in (*advice.single, *advice.together):
        assert not any(text.startswith("critic.") for text in suggestion.overrides)


def test_the_doctor_counts_one_model_and_a_head() -> None:
    config = planner_config(shared=SHARED)
    found = needs_of(
        config,
        architectures=Architectures(actor=LLAMA_8B, critic=None, ref=None),
        world_size=1,
    )
    parameters = num_parameters(LLAMA_8B, head="lm") + LLAMA_8B.hidden_size
    assert num_parameters(LLAMA_8B, head="joint") == parameters
    assert found.checkpoint_bytes == (2 + 12) * parameters


def test_one_and_two_models_do_not_go_on_with_each_others_checkpoints() -> None:
    two = Config()
    shared = changed(two, values={"critic.shared_backbone": True})
    assert list(_refused(plain_config(two), config=two)) == []
    assert "critic.shared_backbone: False -> True" in list(
        _refused(plain_config(two), config=shared)
    )
    assert "critic.shared_backbone: True -> False" in list(
        _refused(plain_config(shared), config=two)
    )
    before = plain_config(two)
    for name in ("shared_backbone", "shared_loss_weight"):  # written before there were the keys
        before["critic"].pop(name)
    assert list(_refused(before, config=two)) == []
    other = changed(shared, values={"critic.shared_loss_weight": 0.5})
    assert "critic.shared_loss_weight changed since: 1.0 -> 0.5" in list(
        _changes(plain_config(shared), config=other)
    )


def test_the_joint_loss_is_a_weighted_sum_over_one_count() -> None:
    weight = torch.tensor([1.0, -2.0], requires_grad=True)
    policy = LossResult(
        loss_sum=(3 * weight).sum(),
        count=torch.tensor(4),
        sums={"ppo/x": torch.tensor([1.0, 4.0])},
        maxima={"ppo/x_max": torch.tensor(2.0)},
    )
    value = LossResult(
        loss_sum=weight.square().sum(),
        count=torch.tensor(4),
        sums={"critic/y": torch.tensor([5.0, 4.0])},
    )
    found = joint_loss(policy, value=value, weight=0.25)
    assert float(found.loss_sum) == -3.0 + 0.25 * 5.0 and int(found.count) == 4
    assert found.sums.keys() == {"ppo/x", "critic/y"} and found.maxima.keys() == {"ppo/x_max"}
    found.loss_sum.backward()
    assert torch.equal(weight.grad, torch.tensor([3 + 0.25 * 2.0, 3 + 0.25 * -4.0]))
