"""PPO updates from a recorded rollout, in any layout, and by a plain loop over transformers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from roles import Shape, build_role, new_factory
from small_models import (
    make_batch,
    make_model,
    response_log_probs,
    response_targets,
    token_values,
)
from torch import Tensor

from rlhf_megatron.algorithms.config import ImportanceSamplingConfig, KlConfig, PpoConfig
from rlhf_megatron.algorithms.kl import KlController, kl_controller
from rlhf_megatron.algorithms.minibatch import mini_batches
from rlhf_megatron.batch import RaggedBatch, load_batch, save_batch
from rlhf_megatron.models.build import VALUE_HEAD
from rlhf_megatron.models.config import OptimizerConfig
from rlhf_megatron.ppo import PpoStep, update_kl_controller

TEMPERATURE = 0.7
MAX_RESPONSE_TOKENS = 12
RATE = 1e-3
NUM_ROUNDS = 3
SEED = 7


def optimizer_config(*, overlaps: bool = False) -> OptimizerConfig:
    """overlaps: of gradients with the backward pass, and of weights with the next forward pass."""
    return OptimizerConfig(
        learning_rate=RATE,
        weight_decay=0.1,
        clip_grad=1.0,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
    )


def ppo_config(**changes) -> PpoConfig:
    """All that can be in the losses at once: KL, entropy, both clips, importance weights (other
    than 1 from the second round on the same rollout), two epochs."""
    options = {
        "epochs": 2,
        "mini_batch_samples": 12,
        "micro_batch_tokens": 64,
        "gamma": 0.98,
        "gae_lambda": 0.9,
        "entropy_coefficient": 0.01,
        "clip_ratio_high": 0.25,
        "dual_clip": 3.0,
        "importance_sampling": ImportanceSamplingConfig(cap=1.2),
        "kl": KlConfig(coefficient=0.1, adaptive=True, target=2.0, horizon_samples=100),
    }
    return PpoConfig(**(options | changes))


def record_rollout(rank: int, path: Path, num_samples: int) -> None:
    """Write a rollout of ragged lengths: among them a truncated response, one of a single token,
    an empty one, and one with tokens that the policy did not sample."""
    generator = torch.Generator().manual_seed(11)

    def lengths(most: int) -> list[int]:
        return torch.randint(1, most + 1, (num_samples,), generator=generator).tolist()

    response_lengths = lengths(MAX_RESPONSE_TOKENS)
    response_lengths[0], response_lengths[1], response_lengths[2] = MAX_RESPONSE_TOKENS, 1, 7
    if num_samples > 4:
        response_lengths[4] = 0
    batch = make_batch(lengths(9), response_lengths=response_lengths)
    mask = torch.ones(batch.num_response_tokens)
    mask[14:16] = 0.0  # of sample 2
    truncated = torch.zeros(num_samples, dtype=torch.bool)
    truncated[0] = True
    batch.sample.update(
        prompt_ids=torch.arange(num_samples),
        sample_indices=torch.zeros(num_samples, dtype=torch.int64),
        truncated=truncated,
        weight_versions=torch.zeros(num_samples, dtype=torch.int64),
        rewards=torch.randn(num_samples, generator=generator),
    )
    every = response_log_probs(make_model("llama"), batch=batch, temperature=TEMPERATURE).detach()
    del batch.response["w"]
    batch.response.update(
        rollout_logprobs=every.gather(1, response_targets(batch)[:, None])[:, 0], loss_mask=mask
    )
    save_batch(batch, path=path)


@dataclass
class Trace:
    """Metrics of every optimizer step, and those of whole rounds."""

    steps: list[dict[str, float]] = field(default_factory=list)
    rounds: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Layouts of actor and critic (the reference has the critic's), and changes of the options."""

    name: str
    actor: Shape = field(default_factory=Shape)
    critic: Shape | None = None
    changes: dict = field(default_factory=dict)
    overlaps: bool = False

    @property
    def world_size(self) -> int:
        return self.actor.world_size


def run_updates(rank: int, models: Path, rollout: Path, case: Case) -> Trace:
    """NUM_ROUNDS rounds on the recorded rollout, as TrainingStep.run takes them."""
    config, factory = ppo_config(**case.changes), new_factory()
    other = case.critic or case.actor
    optimizer = optimizer_config(overlaps=case.overlaps)
    actor = build_role(models / "llama", shape=case.actor, factory=factory, optimizer=optimizer)
    critic = build_role(
        models / "critic",
        shape=other,
        factory=factory,
        head=VALUE_HEAD,
        optimizer=optimizer,
    )
    ref = build_role(models / "reference", shape=other, factory=factory)
    ppo = PpoStep(
        config,
        actor=actor,
        critic=critic,
        ref=ref,
        temperature=TEMPERATURE,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        seed=SEED,
    )
    controller, trace = kl_controller(config.kl), Trace()
    for step in range(1, NUM_ROUNDS + 1):
        one_round(ppo, rollout=rollout, step=step, controller=controller, trace=trace)
    return trace


def one_round(
    ppo: PpoStep, *, rollout: Path, step: int, controller: KlController, trace: Trace
) -> None:
    """A step on the recorded rollout, as TrainingStep.run takes it; adds to `trace`."""
    batch = load_batch(rollout)
    plan = ppo.plan(batch, step=step)
    batch.response["old_logprobs"] = ppo.log_probs(ppo.actor, batch=batch, plan=plan[0])
    assert ppo.ref is not None
    batch.response["ref_logprobs"] = ppo.log_probs(ppo.ref, batch=batch, plan=plan[0])
    values = ppo.values(batch, plan=plan[0])
    batch.response["values"] = values["values"]
    metrics = {"kl/coef": controller.coefficient} | ppo.advantages(
        batch, last_values=values["last"], kl_coefficient=controller.coefficient
    )
    metrics |= ppo.off_policy(batch, version=step - 1)
    critic_report = ppo.update_critic(batch, plan=plan, learning_rate=RATE)
    actor_report = ppo.update_actor(
        batch, plan=plan, learning_rate=RATE, kl_coefficient=controller.coefficient
    )
    update_kl_controller(controller, metrics=metrics, num_samples=len(batch))
    trace.rounds.append(metrics)
    for ours, theirs in zip(actor_report.steps, critic_report.steps, strict=True):
        norms = {"grad_norm/actor": ours.grad_norm, "grad_norm/critic": theirs.grad_norm}
        trace.steps.append(ours.metrics | theirs.metrics | norms)


class PlainPpo:
    """The same by transformers, torch.optim and loops over samples and tokens, without anything of
    the package but its options and batch. KL in the reward, token means."""

    def __init__(self, config: PpoConfig) -> None:
        self.config = config
        self.actor, self.ref = make_model("llama"), make_model("reference")
        self.critic = make_model("critic")
        self.optimizers = [_adamw(model) for model in (self.actor, self.critic)]
        self.beta = config.kl.coefficient

    def log_probs(self, model, batch: RaggedBatch) -> Tensor:
        every = response_log_probs(model, batch=batch, temperature=TEMPERATURE)
        return every.gather(1, response_targets(batch)[:, None])[:, 0]

    @torch.no_grad()
    def prepare(self, batch: RaggedBatch) -> dict[str, float]:
        """Rewards, advantages and returns; the round's metrics."""
        config, response = self.config, batch.response
        old, ref = self.log_probs(self.actor, batch), self.log_probs(self.ref, batch)
        values, last = token_values(self.critic, batch=batch)
        mask = response["loss_mask"]
        advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
        sums, end = [], 0
        for index, length in enumerate(batch.response_lengths.tolist()):
            begin, end = end, end + length
            chosen = [t for t in range(begin, end) if mask[t] > 0]
            if chosen:
                sums.append(sum(float(old[t] - ref[t]) for t in chosen))
            following = float(last[index]) if batch.sample["truncated"][index] else 0.0
            accumulated = 0.0
            for t in reversed(chosen):
                reward = -self.beta * float(old[t] - ref[t])
                reward += float(batch.sample["rewards"][index]) if t == chosen[-1] else 0.0
                delta = reward + config.gamma * following - float(values[t])
                accumulated = delta + config.gamma * config.gae_lambda * accumulated
                following = float(values[t])
                advantages[t] = accumulated
                returns[t] = accumulated + values[t]
        valid = mask > 0
        spread = advantages[valid].std(correction=0)
        advantages = torch.where(valid, (advantages - advantages[valid].mean()) / spread, 0.0)
        unexplained = (returns - values)[valid].var(correction=0) / returns[valid].var(correction=0)
        response.update(old=old, old_values=values, advantages=advantages, returns=returns)
        mean = sum(sums) / len(sums)
        weights = [
            math.exp(float(old[t] - response["rollout_logprobs"][t])) if mask[t] > 0 else 0.0
            for t in range(len(mask))
        ]
        cap, count = config.importance_sampling.cap, int(valid.sum())
        response["weights"] = torch.tensor([min(weight, cap) for weight in weights])
        metrics = {
            "kl/coef": self.beta,
            "kl/mean": mean,
            "off_policy/is_weight_mean": sum(weights) / count,
            "off_policy/is_weight_max": max(weights),
            "off_policy/is_clipped_fraction": sum(weight > cap for weight in weights) / count,
        }
        error = min(max(mean / config.kl.target - 1, -0.2), 0.2)
        self.beta *= 1 + error * min(len(batch) / config.kl.horizon_samples, 1)
        return metrics | {"critic/explained_variance": 1 - float(unexplained)}

    def step(self, batch: RaggedBatch) -> dict[str, float]:
        """One optimizer step of each model on a mini-batch."""
        policy, metrics = self.policy_loss(batch)
        norms = {"grad_norm/actor": self._update(0, policy)}
        value = self.value_loss(batch)
        norms["grad_norm/critic"] = self._update(1, value)
        return metrics | {"critic/value_loss": float(value)} | norms

    def policy_loss(self, batch: RaggedBatch) -> tuple[Tensor, dict[str, float]]:
        """The actor's loss on a mini-batch, and its metrics."""
        config, response = self.config, batch.response
        valid = response["loss_mask"] > 0
        advantages = response["advantages"][valid]
        every = response_log_probs(self.actor, batch=batch, temperature=TEMPERATURE)
        new = every.gather(1, response_targets(batch)[:, None])[:, 0][valid]
        entropy = -(every.exp() * every).sum(-1)[valid].mean()
        ratio = (new - response["old"][valid]).exp()
        low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
        surrogate = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
        bounded = torch.max(surrogate, config.dual_clip * advantages)
        chosen = torch.where(advantages < 0, bounded, surrogate)
        objective = (chosen * response["weights"][valid]).mean()
        metrics = {
            "ppo/policy_loss": -float(objective),
            "ppo/approx_kl": float((ratio - 1 - ratio.log()).mean()),
            "ppo/entropy": float(entropy),
        }
        return -objective - config.entropy_coefficient * entropy, metrics

    def value_loss(self, batch: RaggedBatch) -> Tensor:
        """The critic's loss on a mini-batch."""
        config, response = self.config, batch.response
        valid = response["loss_mask"] > 0
        returns = response["returns"][valid]
        values = token_values(self.critic, batch=batch)[0][valid]
        old_values = response["old_values"][valid]
        clipped = torch.clamp(
            values, old_values - config.value_clip, old_values + config.value_clip
        )
        errors = torch.max((values - returns) ** 2, (clipped - returns) ** 2)
        return errors.mean() / 2

    def _update(self, which: int, loss: Tensor) -> float:
        model, optimizer = (self.actor, self.critic)[which], self.optimizers[which]
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(norm)


def _adamw(model) -> torch.optim.AdamW:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)


def run_plain(rank: int, rollout: Path, plans: Sequence[Sequence[Sequence[list[int]]]]) -> Trace:
    """`plans`: the mini-batches of each round and epoch."""
    plain, trace = PlainPpo(ppo_config()), Trace()
    for plan in plans:
        batch = load_batch(rollout)
        trace.rounds.append(plain.prepare(batch))
        trace.steps += [plain.step(batch.select(mini)) for epoch in plan for mini in epoch]
    return trace


def epoch_plans(num_samples: int) -> list[list[list[list[int]]]]:
    """The mini-batches of 12 samples of each round's two epochs, from the seed by hand."""
    return [
        [
            mini_batches(
                num_samples,
                mini_batch_samples=12,
                seed=(SEED * 1_000_003 + step) * 1_009 + epoch,
            )
            for epoch in range(2)
        ]
        for step in range(1, NUM_ROUNDS + 1)
    ]
