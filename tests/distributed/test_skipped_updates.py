"""Updates that are not taken leave weights and optimizer as they were, on all ranks."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks
from roles import CPU, Shape, build_role, new_factory
from updates import (
    MAX_RESPONSE_TOKENS,
    RATE,
    SEED,
    TEMPERATURE,
    optimizer_config,
    ppo_config,
    record_rollout,
)

from rlhf_megatron.bad_steps import BadSteps, check_weights
from rlhf_megatron.batch import load_batch
from rlhf_megatron.errors import JobError
from rlhf_megatron.faults_config import FaultsConfig
from rlhf_megatron.models.build import VALUE_HEAD
from rlhf_megatron.ppo import PpoStep

SHAPES = [Shape(tp=2, dp=2), Shape(pp=2, dp=2)]
FAULTS = ["nan_gradient", "inf_advantage", "nan_value", "large_norm"]


@pytest.fixture(scope="module")
def rollout(models, tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("rollout") / "rollout.pt"
    run_ranks(1, record_rollout, path, 12)
    return path


class Roles:
    """Actor and critic with a guard, and a batch that is ready for updates."""

    def __init__(self, models: Path, rollout: Path, shape: Shape, folder: Path, **faults) -> None:
        factory, self.said = new_factory(), []
        self.actor = build_role(
            models / "llama", shape=shape, factory=factory, optimizer=optimizer_config()
        )
        self.critic = build_role(
            models / "critic",
            shape=shape,
            factory=factory,
            head=VALUE_HEAD,
            optimizer=optimizer_config(),
        )
        options = {"grad_norm_factor": 20.0, "grad_norm_window_updates": 1}
        self.guard = BadSteps(
            FaultsConfig(**(options | faults)),
            output_dir=folder,
            rank=dist.get_rank(),
            group=dist.group.WORLD,
            say=self.said.append,
            check_weights=self.check_weights,
        )
        self.ppo = PpoStep(
            ppo_config(epochs=1),
            actor=self.actor,
            critic=self.critic,
            ref=None,
            temperature=TEMPERATURE,
            max_response_tokens=MAX_RESPONSE_TOKENS,
            seed=SEED,
            guard=self.guard,
        )
        self.batch = load_batch(rollout)
        self.plan = self.ppo.plan(self.batch, step=1)
        response = self.batch.response
        response["old_logprobs"] = self.ppo.log_probs(
            self.actor, batch=self.batch, plan=self.plan[0]
        )
        response["ref_logprobs"] = response["old_logprobs"].clone()
        values = self.ppo.values(self.batch, plan=self.plan[0])
        response["values"] = values["values"]
        self.ppo.advantages(self.batch, last_values=values["last"], kl_coefficient=0.1)
        self.ppo.off_policy(self.batch, version=0)

    def check_weights(self, when: str, role: str) -> None:
        roles = {"actor": self.actor, "critic": self.critic}
        check_weights(roles, group=dist.group.WORLD, device=CPU, when=when)

    def update(self, step: int):
        self.guard.step_begins(step)
        critic = self.ppo.update_critic(self.batch, plan=self.plan, learning_rate=RATE)
        actor = self.ppo.update_actor(
            self.batch, plan=self.plan, learning_rate=RATE, kl_coefficient=0.1
        )
        return critic, actor, self.guard.step_ends()

    def state(self) -> list[torch.Tensor]:
        """Weights, master weights, moments and counts of this rank."""
        found = []
        for engine in (self.actor, self.critic):
            found += [p.detach().clone() for p in engine.model.parameters().values()]
            for part in engine.optimizer.chained_optimizers:
                for group in part.param_groups:
                    found.append(torch.tensor(float(group.get("step", 0))))
                    for parameter in group["params"]:
                        found.append(parameter.detach().clone())
                        found += [
                            torch.as_tensor(v).clone() for v in part.state[parameter].values()
                        ]
        return found


def plant(roles: Roles, fault: str) -> None:
    """What makes the updates of both roles bad; `mend` takes it back."""
    response = roles.batch.response
    if fault == "nan_gradient":  # on one rank, in a weight that tensor-parallel ranks hold alike
        if dist.get_rank() == dist.get_world_size() - 1:
            for engine in (roles.actor, roles.critic):
                name = next(n for n in engine.model.parameters() if "final_layernorm" in n)
                parameter = engine.model.parameters()[name]
                roles.hooks = [
                    *getattr(roles, "hooks", []),
                    parameter.register_hook(lambda grad: grad * math.nan),
                ]
        return
    roles.saved = {name: values.clone() for name, values in response.items()}
    if fault == "inf_advantage":
        response["advantages"][3] = math.inf
        response["returns"][3] = -math.inf
    elif fault == "nan_value":
        response["values"][5] = math.nan
        response["old_logprobs"][5] = math.nan
    else:
        response["advantages"] *= 1e4
        response["returns"] = response["returns"] * 1e4 + 1e4


def mend(roles: Roles) -> None:
    for hook in getattr(roles, "hooks", []):
        hook.remove()
    roles.batch.response.update(getattr(roles, "saved", {}))


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def skipped(rank: int, models: Path, rollout: Path, shape: Shape, fault: str, folder: Path) -> dict:
    """A good step, a bad one, a good one; and the two good ones alone."""
    roles = Roles(models, rollout, shape, folder, bad_step="skip")
    roles.update(1)
    before = roles.state()
    plant(roles, fault)
    critic, actor, metrics = roles.update(2)
    unchanged = same(before, roles.state())
    mend(roles)
    *_, after = roles.update(3)
    plain = Roles(models, rollout, shape, folder, bad_step="skip")
    plain.update(1)
    plain.update(3)
    moved = not same(before, roles.state())
    return {
        "unchanged": unchanged,
        "moved": moved,
        "as_if_never": same(roles.state(), plain.state()),
        "taken": (len(critic.steps), len(actor.steps)),
        "metrics": metrics,
        "after": after,
        "said": roles.said,
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_skipped_update_changes_nothing(models, rollout, tmp_path, shape, fault):
    results = run_ranks(4, skipped, models, rollout, shape, fault, tmp_path)
    for found in results:
        assert found["unchanged"] and found["moved"] and found["as_if_never"]
        assert found["taken"] == (0, 0)
        assert found["metrics"] == {"faults/bad_steps": 1.0, "faults/skipped_updates": 2.0}
        assert found["after"] == {"faults/bad_steps": 1.0, "faults/skipped_updates": 0.0}
        assert found["said"] == results[0]["said"]
    critic, actor = results[0]["said"]
    assert critic.startswith("skipped: update_critic of step 2, update 1 of 1: ")
    cause = {
        "nan_gradient": r"the gradient on rank \d is not finite",  # the rank that adds them up
        "inf_advantage": r"ppo/policy_loss=.* 1 of \d+ advantages that are not finite",
        "nan_value": r"ppo/policy_loss=nan.* 1 of \d+ old_logprobs that are not finite",
        "large_norm": r"its gradient norm \S+ is more than 20 times \S+, the median of the last 1 ",
    }[fault]
    assert re.search(cause, actor), actor
    saved = load_batch(tmp_path / "bad_batches" / "step_000002_update_actor_001.pt")
    assert f"{tmp_path}/bad_batches/step_000002_update_actor_001.pt" in actor
    assert len(saved) == 12
    assert saved.response["advantages"].isfinite().all() == (fault != "inf_advantage")


def stopped(rank: int, models: Path, rollout: Path, shape: Shape, fault: str, folder: Path):
    roles = Roles(models, rollout, shape, folder, bad_step="stop")
    roles.update(1)
    before = roles.state()
    plant(roles, fault)
    with pytest.raises(JobError) as error:
        roles.update(2)
    return str(error.value), same(before, roles.state())


@pytest.mark.parametrize("fault", ["nan_gradient", "large_norm"])
def test_a_bad_update_stops_the_run_with_one_message(models, rollout, tmp_path, fault):
    results = run_ranks(4, stopped, models, rollout, SHAPES[0], fault, tmp_path)
    messages = {message for message, _ in results}
    assert len(messages) == 1 and all(unchanged for _, unchanged in results)
    message = messages.pop()
    assert message.startswith("bad step on all ranks in update_critic of step 2, update 1 of 1: ")
    assert "faults.bad_step=skip" in message and "\n" not in message
    path = tmp_path / "bad_batches" / "step_000002_update_critic_001.pt"
    assert str(path) in message and len(load_batch(path)) == 12


def spoilt(rank: int, models: Path, rollout: Path, folder: Path) -> str:
    roles = Roles(models, rollout, SHAPES[0], folder, bad_step="skip")
    roles.check_weights("at the start", "")
    if rank == 2:
        roles.actor.model.parameters()["decoder.layers.1.mlp.linear_fc2.weight"].data[0, 1] = (
            math.inf
        )
    with pytest.raises(JobError) as error:
        roles.update(4)
    return str(error.value)


def test_weights_that_are_not_finite_are_named(models, rollout, tmp_path):
    messages = set(run_ranks(4, spoilt, models, rollout, tmp_path))
    assert len(messages) == 1
    message = messages.pop()
    assert message.startswith("weights are not finite in update_actor of step 4, on 1 rank(s): ")
    assert "rank 2: actor: decoder.layers.1.mlp.linear_fc2.weight (1 of " in message
