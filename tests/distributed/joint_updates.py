"""Updates of an actor with both heads, in any layout, and by a plain loop over transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from roles import build_role, new_factory
from safetensors.torch import load_file, save_file
from small_models import make_model, token_values
from torch import Tensor
from updates import (
    MAX_RESPONSE_TOKENS,
    NUM_ROUNDS,
    RATE,
    SEED,
    TEMPERATURE,
    Case,
    PlainPpo,
    Trace,
    _adamw,
    optimizer_config,
    ppo_config,
)

from rlhf_megatron.algorithms.kl import kl_controller
from rlhf_megatron.batch import RaggedBatch, load_batch, save_batch
from rlhf_megatron.checkpoint.optimizer_slices import own_ranges
from rlhf_megatron.data.config import WarmupConfig
from rlhf_megatron.data.prompts import Demonstration
from rlhf_megatron.models.build import JOINT_HEAD
from rlhf_megatron.ppo import PpoStep, update_kl_controller
from rlhf_megatron.warmup import SupervisedWarmup

WEIGHT = 0.7


def make_joint(kind: str) -> torch.nn.Module:
    """The model, with a scalar head as transformers' classifiers have."""
    model = make_model(kind)
    model.score = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        model.score.weight.copy_(0.1 * torch.randn(model.score.weight.shape, generator=generator))
    return model


def save_joint(rank: int, folder: Path, kinds: Sequence[str]) -> None:
    """A directory joint_KIND of each kind: a language model's, with the head in its weights."""
    for kind in kinds:
        path = folder / f"joint_{kind}"
        make_model(kind).save_pretrained(path)
        tensors = load_file(path / "model.safetensors")
        tensors["score.weight"] = make_joint(kind).score.weight.detach().clone()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


class NoUpdate:
    """An UpdateGuard: leaves the gradient where it is."""

    wants_norm = False

    def takes(self, result, *, update) -> bool:
        assert result.nonfinite_rank == -1
        return False


def joint_step(
    directory: Path, *, case: Case, precision: str = "fp32", guard: NoUpdate | None = None
) -> PpoStep:
    actor = build_role(
        directory,
        shape=case.actor,
        factory=new_factory(),
        head=JOINT_HEAD,
        optimizer=optimizer_config(overlaps=case.overlaps),
        precision=precision,
    )
    return PpoStep(
        ppo_config(**case.changes),
        actor=actor,
        critic=None,
        ref=None,
        temperature=TEMPERATURE,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        seed=SEED,
        guard=guard,
        shared_loss_weight=WEIGHT,
    )


def run_joint(rank: int, models: Path, rollout: Path, case: Case) -> Trace:
    """NUM_ROUNDS rounds on the recorded rollout; `updates.run_updates` has two models."""
    ppo, trace = joint_step(models / "joint_llama", case=case), Trace()
    controller = kl_controller(ppo_config().kl)
    ref = build_role(models / "reference", shape=case.actor, factory=new_factory())
    for step in range(1, NUM_ROUNDS + 1):
        batch = load_batch(rollout)
        plan = ppo.plan(batch, step=step)
        found = ppo.log_probs_and_values(batch, plan=plan[0])
        batch.response.update(
            old_logprobs=found["logprobs"],
            values=found["values"],
            ref_logprobs=ppo.log_probs(ref, batch=batch, plan=plan[0]),
        )
        metrics = {"kl/coef": controller.coefficient} | ppo.advantages(
            batch, last_values=found["last"], kl_coefficient=controller.coefficient
        )
        metrics |= ppo.off_policy(batch, version=step - 1)
        report = ppo.update_actor(
            batch, plan=plan, learning_rate=RATE, kl_coefficient=controller.coefficient
        )
        update_kl_controller(controller, metrics=metrics, num_samples=len(batch))
        trace.rounds.append(metrics)
        trace.steps += [s.metrics | {"grad_norm/actor": s.grad_norm} for s in report.steps]
    return trace


def warm_up_joint(rank: int, directory: Path, case: Case) -> list[float]:
    """The losses of a supervised warm-up, which has no use for the values."""
    actor = joint_step(directory, case=case).actor
    assert actor is not None
    demonstrations = [
        Demonstration(prompt_ids=(n, n + 1), response_ids=(n + 2, 3, 1)) for n in range(4, 20)
    ]
    warmup = SupervisedWarmup(
        actor,
        demonstrations=demonstrations,
        config=WarmupConfig(steps=3, samples_per_step=8),
        micro_batch_tokens=16,
        seed=SEED,
    )
    return [warmup.step() for _ in range(3)]


class PlainJoint(PlainPpo):
    """One model, one optimizer, and the sum of the losses."""

    def __init__(self, kind: str) -> None:
        super().__init__(ppo_config())
        self.actor = self.critic = make_joint(kind)
        self.optimizers = [_adamw(self.actor)]

    def step(self, batch: RaggedBatch) -> dict[str, float]:
        policy, metrics = self.policy_loss(batch)
        value = self.value_loss(batch)
        norm = self._update(0, policy + WEIGHT * value)
        return metrics | {"critic/value_loss": float(value), "grad_norm/actor": norm}


def run_plain_joint(
    rank: int, rollout: Path, plans: Sequence[Sequence[Sequence[list[int]]]]
) -> Trace:
    """`plans`: the mini-batches of each round and epoch."""
    plain, trace = PlainJoint("llama"), Trace()
    for plan in plans:
        batch = load_batch(rollout)
        trace.rounds.append(plain.prepare(batch))
        trace.steps += [plain.step(batch.select(mini)) for epoch in plan for mini in epoch]
    return trace


def prepare_gradient(rank: int, rollout: Path, kind: str, folder: Path) -> None:
    """Write batch.pt, with old figures near and far from the present ones, and gradients.pt: the
    gradient of the policy loss plus WEIGHT times that of the value loss, each from a backward pass
    of its own."""
    batch, plain = load_batch(rollout), PlainJoint(kind)
    generator = torch.Generator().manual_seed(5)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(batch.num_response_tokens, generator=generator)

    with torch.no_grad():
        old = plain.log_probs(plain.actor, batch) + noise(0.2)
        values = token_values(plain.actor, batch=batch)[0] + noise(0.3)
    weights = torch.rand(batch.num_response_tokens, generator=generator)
    batch.response |= {
        "old_logprobs": old,
        "values": values,
        "advantages": noise(1.0),
        "returns": noise(1.0),
        "importance_weights": weights,
    }
    save_batch(batch, path=folder / "batch.pt")
    batch.response |= {"old": old, "old_values": values, "weights": weights}
    parts = []
    for loss in (plain.policy_loss(batch)[0], plain.value_loss(batch)):
        plain.actor.zero_grad()
        loss.backward()
        parts.append({n: p.grad for n, p in plain.actor.named_parameters() if p.grad is not None})
    policy, value = parts
    zero = torch.zeros(())
    joint = {n: p + WEIGHT * value.get(n, zero) for n, p in policy.items()}
    joint["score.weight"] = WEIGHT * value["score.weight"]
    torch.save({"joint": joint, "policy": policy}, folder / "gradients.pt")


@dataclass
class Compared:
    """A gradient against the expected one."""

    worst: float = 0.0
    """Largest difference."""
    largest: float = 0.0
    """Largest expected."""
    difference_squared: float = 0.0
    expected_squared: float = 0.0
    count: int = 0


def gradient_differences(
    rank: int, directory: Path, folder: Path, case: Case, precision: str = "fp32"
) -> dict[str, Compared]:
    """By logical tensor: what this rank has of its gradient, against the expected one."""
    ppo = joint_step(directory, case=case, precision=precision, guard=NoUpdate())
    batch = load_batch(folder / "batch.pt")
    ppo.update_actor(
        batch, plan=[[list(range(len(batch)))]], learning_rate=RATE, kl_coefficient=0.0
    )
    expected = torch.load(folder / "gradients.pt")["joint"]
    model = ppo.actor.model
    found: dict[str, Compared] = {}
    parameters = model.parameters()
    owned = {}
    for name, parameter in parameters.items():
        own = own_ranges(ppo.actor.optimizer).get(parameter)
        mask = torch.zeros(parameter.numel(), dtype=torch.bool)
        if own is not None:  # of several replicas each has the sum of its own share alone
            mask[own.start : own.stop] = True
        owned[name] = mask.view(parameter.shape)
    for placement in model.rank_layout(dist.get_rank()):
        region = placement.region(placement.box)
        wanted = expected[placement.tensor][placement.box.slices()]
        mask = owned[placement.parameter][region]
        difference = (parameters[placement.parameter].main_grad[region].float() - wanted) * mask
        of = found.setdefault(placement.tensor, Compared())
        of.worst = max(of.worst, float(difference.abs().max()))
        of.largest = max(of.largest, float(wanted.abs().max()))
        of.difference_squared += float(difference.square().sum())
        of.expected_squared += float((wanted * mask).square().sum())
        of.count += int(mask.sum())
    return found
