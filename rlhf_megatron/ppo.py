"""One PPO step on the scored responses: log-probs, values, advantages, and the two updates.

Everything here works on the step's whole batch, which every rank holds: mini-batches, advantages
and normalisers are those of the whole batch whatever the layouts of the roles, and each role cuts
the mini-batches to its own data-parallel ranks.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlhf_megatron.algorithms.config import PpoConfig
from rlhf_megatron.algorithms.gae import (
    bootstrap_values,
    generalized_advantage_estimation,
    truncated_loss_mask,
)
from rlhf_megatron.algorithms.importance import importance_weights
from rlhf_megatron.algorithms.kl import KlController
from rlhf_megatron.algorithms.losses import LossSum, explained_variance, policy_loss, value_loss
from rlhf_megatron.algorithms.minibatch import mini_batches
from rlhf_megatron.algorithms.ragged import response_sums
from rlhf_megatron.algorithms.rewards import token_rewards
from rlhf_megatron.algorithms.whitening import whiten
from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.engine.microbatch import MicroBatch
from rlhf_megatron.engine.model_engine import LossResult, ModelEngine, StepResult
from rlhf_megatron.joint_loss import joint_loss
from rlhf_megatron.micro_batches import (
    Packing,
    pack_samples,
    packed_micro_batches,
)
from rlhf_megatron.updates import MiniBatch, NoGuard, Update, UpdateGuard, UpdateReport

POLICY_FIELDS: tuple[str, ...] = ("old_logprobs", "advantages", "loss_mask")
VALUE_FIELDS = ("values", "returns", "loss_mask")


class PpoStep:
    """The parts of one step, called by the trainer phase by phase."""

    def __init__(
        self,
        config: PpoConfig,
        *,
        actor: ModelEngine | None,
        critic: ModelEngine | None,
        ref: ModelEngine | None,
        temperature: float,
        max_response_tokens: int,
        seed: int,
        guard: UpdateGuard | None = None,
        shared_loss_weight: float | None = None,
    ) -> None:
        """actor, critic, ref: None on a rank without a part of them, which does not call what needs
        them; `ref` also where there is none.

        shared_loss_weight: of an actor with both heads, that of the value loss in its updates
        (joint_loss.py); there is no critic then."""
        self._config = config
        self._shared_loss_weight = shared_loss_weight
        self._guard = guard or NoGuard()
        self.actor, self.critic, self.ref = actor, critic, ref
        self._temperature = temperature
        self._max_response_tokens = max_response_tokens
        self._seed = seed

    def plan(self, batch: RaggedBatch, *, step: int) -> list[list[MiniBatch]]:
        """The mini-batches of each epoch, from (seed, step, epoch)."""
        return [
            mini_batches(
                len(batch),
                mini_batch_samples=self._config.mini_batch_samples,
                seed=(self._seed * 1_000_003 + step) * 1_009 + epoch,
            )
            for epoch in range(self._config.epochs)
        ]

    def log_probs(
        self, engine: ModelEngine, *, batch: RaggedBatch, plan: Sequence[MiniBatch]
    ) -> Tensor:
        """log pi of each response token, [R] float32, under the tempered policy.

        The micro-batches are those of the first epoch's updates, so that the first ratio is exactly
        1: another packing would round differently.
        """

        def outputs(hidden: Tensor, micro: MicroBatch) -> dict[str, tuple[Tensor, Tensor]]:
            found = engine.log_probs(hidden, micro_batch=micro, temperature=self._temperature)
            return {"logprobs": (found.logprobs, micro.response_rows)}

        found = engine.infer(
            self._micro_batches(engine, batch, plan),
            outputs=outputs,
            sizes={"logprobs": batch.num_response_tokens},
        )
        return found["logprobs"]

    def log_probs_and_values(
        self, batch: RaggedBatch, *, plan: Sequence[MiniBatch]
    ) -> dict[str, Tensor]:
        """Of an actor with both heads: `log_probs` as "logprobs", and `values`, in one pass."""
        actor = self.actor
        assert actor is not None

        def outputs(hidden: Tensor, micro: MicroBatch) -> dict[str, tuple[Tensor, Tensor]]:
            assert micro.values is not None, "the actor has one head"
            found = actor.log_probs(hidden, micro_batch=micro, temperature=self._temperature)
            return {
                "logprobs": (found.logprobs, micro.response_rows),
                **_value_outputs(micro.values, micro),
            }

        return actor.infer(
            self._micro_batches(actor, batch, plan),
            outputs=outputs,
            sizes={
                "logprobs": batch.num_response_tokens,
                "values": batch.num_response_tokens,
                "last": len(batch),
            },
        )

    def values(self, batch: RaggedBatch, *, plan: Sequence[MiniBatch]) -> dict[str, Tensor]:
        """The critic's "values" at each response token's state, [R], and "last" at each sample's
        last token, [B] (what a truncated response goes on with)."""

        critic = self.critic
        assert critic is not None, "the values come with the log-probs"
        return critic.infer(
            self._micro_batches(critic, batch, plan),
            outputs=lambda output, micro: _value_outputs(output[:, 0], micro),
            sizes={"values": batch.num_response_tokens, "last": len(batch)},
        )

    def advantages(
        self, batch: RaggedBatch, *, last_values: Tensor, kl_coefficient: float
    ) -> dict[str, float]:
        """Add `advantages`, `returns` and the final `loss_mask` to the batch; the metrics of it."""
        config, response = self._config, batch.response
        truncated = batch.sample["truncated"]
        mask = truncated_loss_mask(
            response["loss_mask"],
            truncated=truncated,
            response_lengths=batch.response_lengths,
            policy=config.truncated,
        )
        scores = batch.sample["rewards"]
        if config.reward_clip > 0:
            scores = scores.clamp(-config.reward_clip, config.reward_clip)
        in_reward = config.kl.place == "reward"
        rewards = token_rewards(
            scores,
            response_lengths=batch.response_lengths,
            loss_mask=mask,
            logprobs=response["old_logprobs"],
            ref_logprobs=response["ref_logprobs"] if in_reward else None,
            kl_coefficient=kl_coefficient if in_reward else 0.0,
            truncated=truncated,
            policy=config.truncated,
            truncation_penalty=config.truncation_penalty,
        )
        result = generalized_advantage_estimation(
            rewards,
            values=response["values"],
            bootstrap_values=bootstrap_values(
                last_values, truncated=truncated, policy=config.truncated
            ),
            response_lengths=batch.response_lengths,
            loss_mask=mask,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        advantages = result.advantages
        if config.whiten_advantages:
            advantages = whiten(advantages, mask=mask)
        response.update(
            loss_mask=mask,
            token_rewards=rewards,
            advantages=advantages.float(),
            returns=result.returns.float(),
        )
        metrics = {
            "critic/explained_variance": explained_variance(
                response["values"], returns=result.returns, mask=mask
            )
        }
        return metrics | self._kl_metrics(batch)

    def off_policy(self, batch: RaggedBatch, *, version: int) -> dict[str, float]:
        """Add `importance_weights` to the batch; how far its samples are from the policy `version`.

        After `advantages`, whose loss_mask decides which tokens count.
        """
        found = importance_weights(
            batch.response["old_logprobs"],
            rollout_logprobs=batch.response["rollout_logprobs"],
            loss_mask=batch.response["loss_mask"],
            cap=self._config.importance_sampling.cap,
        )
        batch.response["importance_weights"] = found.weights
        lag = version - batch.sample["weight_versions"].double()
        return found.metrics | {
            "off_policy/weight_version_lag_mean": float(lag.mean()),
            "off_policy/weight_version_lag_max": float(lag.max()),
        }

    def update_critic(
        self, batch: RaggedBatch, *, plan: Sequence[Sequence[MiniBatch]], learning_rate: float
    ) -> UpdateReport:
        """One optimizer step for each mini-batch of each epoch."""

        return self._update(
            "critic",
            batch,
            plan=plan,
            fields=VALUE_FIELDS,
            loss=lambda output, micro: self._value_loss(output[:, 0], micro),
            learning_rate=learning_rate,
        )

    def update_actor(
        self,
        batch: RaggedBatch,
        *,
        plan: Sequence[Sequence[MiniBatch]],
        learning_rate: float,
        kl_coefficient: float,
    ) -> UpdateReport:
        """As `update_critic`; stops after a mini-batch whose approximate KL exceeds target_kl.

        Of an actor with both heads the loss is policy loss + shared_loss_weight * value loss.
        """
        actor = self.actor
        assert actor is not None
        in_loss = self._config.kl.place == "loss"
        weighted = self._config.importance_sampling.cap > 0

        def loss(hidden: Tensor, micro: MicroBatch) -> LossResult:
            found = actor.log_probs(hidden, micro_batch=micro, temperature=self._temperature)
            result = _as_result(
                policy_loss(
                    found.logprobs,
                    old_logprobs=micro.fields["old_logprobs"],
                    advantages=micro.fields["advantages"],
                    loss_mask=micro.fields["loss_mask"],
                    response_lengths=micro.response_lengths,
                    entropy=found.entropy,
                    ref_logprobs=micro.fields["ref_logprobs"] if in_loss else None,
                    config=self._config,
                    kl_coefficient=kl_coefficient,
                    max_response_tokens=self._max_response_tokens,
                    importance_weights=(micro.fields["importance_weights"] if weighted else None),
                )
            )
            if micro.values is None:
                return result
            assert self._shared_loss_weight is not None, "the actor has both heads"
            value = self._value_loss(micro.values, micro)
            return joint_loss(result, value=value, weight=self._shared_loss_weight)

        fields = POLICY_FIELDS
        fields += ("values", "returns") if self._shared_loss_weight is not None else ()
        fields += ("ref_logprobs",) if in_loss else ()
        fields += ("importance_weights",) if weighted else ()
        target_kl = self._config.target_kl
        return self._update(
            "actor",
            batch,
            plan=plan,
            fields=fields,
            loss=loss,
            learning_rate=learning_rate,
            stop=lambda r: target_kl > 0 and r.metrics["ppo/approx_kl"] > target_kl,
        )

    def _value_loss(self, values: Tensor, micro: MicroBatch) -> LossResult:
        """`values`: [T], of all tokens of the micro-batch."""
        return _as_result(
            value_loss(
                values[micro.state_indices],
                old_values=micro.fields["values"],
                returns=micro.fields["returns"],
                loss_mask=micro.fields["loss_mask"],
                response_lengths=micro.response_lengths,
                config=self._config,
                max_response_tokens=self._max_response_tokens,
            )
        )

    def _update(
        self,
        role: str,
        batch: RaggedBatch,
        *,
        plan: Sequence[Sequence[MiniBatch]],
        fields: Sequence[str],
        loss: Callable[[Tensor, MicroBatch], LossResult],
        learning_rate: float,
        stop: Callable[[StepResult], bool] = lambda _: False,
    ) -> UpdateReport:
        engine = self.actor if role == "actor" else self.critic
        assert engine is not None
        report = UpdateReport()
        tokens = torch.zeros(len(batch)).index_add_(
            0, batch.sample_of_response_token, (batch.response["loss_mask"] > 0).float()
        )
        # A mini-batch that is all masked would only follow momentum and weight decay.
        minis = [mini for epoch in plan for mini in epoch if tokens[mini].any()]
        with engine.consecutive_updates():
            for number, mini in enumerate(minis, start=1):

                def takes(result: StepResult, number: int = number, mini: MiniBatch = mini) -> bool:
                    update = Update(
                        role=role, number=number, count=len(minis), step_batch=batch, samples=mini
                    )
                    return self._guard.takes(result, update=update)

                packing = self._pack(engine, batch, mini)
                report.packings.append(packing.figures)
                result = engine.train_step(
                    packed_micro_batches(engine, batch=batch, packing=packing, fields=fields),
                    loss=loss,
                    learning_rate=learning_rate,
                    takes=takes,
                    with_norm=self._guard.wants_norm,
                )
                if not result.updated:
                    continue
                report.mini_batches.append(mini)
                report.steps.append(result)
                if stop(result):
                    report.stopped_early = True
                    break
        return report

    def _pack(self, engine: ModelEngine, batch: RaggedBatch, mini_batch: MiniBatch) -> Packing:
        return pack_samples(
            engine,
            batch=batch,
            samples=mini_batch,
            micro_batch_tokens=self._config.micro_batch_tokens,
            micro_batch_samples=self._config.micro_batch_samples,
        )

    def _micro_batches(
        self, engine: ModelEngine, batch: RaggedBatch, plan: Sequence[MiniBatch]
    ) -> list[MicroBatch]:
        """Of all mini-batches, for a pass without gradients."""
        return [
            micro_batch
            for mini in plan
            for micro_batch in packed_micro_batches(
                engine, batch=batch, packing=self._pack(engine, batch, mini), fields=()
            )
        ]

    def _kl_metrics(self, batch: RaggedBatch) -> dict[str, float]:
        """kl/mean: mean over responses with a valid token of the summed log-ratio, in nats."""
        if "ref_logprobs" not in batch.response:
            return {}
        response = batch.response
        sums = response_sums(
            response["old_logprobs"] - response["ref_logprobs"],
            loss_mask=response["loss_mask"],
            response_lengths=batch.response_lengths,
        )
        valid = response["loss_mask"] > 0
        num_responses = len(batch.sample_of_response_token[valid].unique())
        return {
            "kl/mean": float(sums.sum()) / max(num_responses, 1),
            "kl/per_token": float(sums.sum()) / max(int(valid.sum()), 1),
        }


def _value_outputs(values: Tensor, micro: MicroBatch) -> dict[str, tuple[Tensor, Tensor]]:
    """`values`: [T], of all tokens of the micro-batch."""
    return {
        "values": (values[micro.state_indices], micro.response_rows),
        "last": (values[micro.last_indices], micro.sample_rows),
    }


def _as_result(loss: LossSum) -> LossResult:
    return LossResult(
        loss_sum=loss.loss_sum,
        count=loss.count,
        sums=loss.metrics.sums,
        maxima=loss.metrics.maxima,
    )


def score_metrics(batch: RaggedBatch) -> dict[str, float]:
    """Rewards and lengths of the step's responses."""
    rewards = batch.sample["rewards"].double()
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(correction=0)),
        "response/length_mean": float(batch.response_lengths.double().mean()),
        "response/truncated_fraction": float(batch.sample["truncated"].double().mean()),
    }


def update_kl_controller(
    controller: KlController, *, metrics: dict[str, float], num_samples: int
) -> None:
    """Steer beta by the step's mean KL, where there is one, and it is a number."""
    if math.isfinite(metrics.get("kl/mean", math.nan)):
        controller.update(metrics["kl/mean"], num_samples=num_samples)
