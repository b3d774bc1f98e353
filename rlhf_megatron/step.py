"""One PPO step: rollout -> reward -> log-probs, values -> advantages -> updates -> reshard.

Each phase is entered through the ledger; what hangs on phases (time limits, stopping, offload, the
progress line) listens there (observability/ledger.py) and is not named here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlhf_megatron import checks
from rlhf_megatron.algorithms.kl import KlController
from rlhf_megatron.algorithms.schedule import learning_rate
from rlhf_megatron.bad_steps import BadSteps, check_weights
from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.config import Config
from rlhf_megatron.data.loader import PromptLoader
from rlhf_megatron.engine_weights import EngineWeights
from rlhf_megatron.experience import Experience, ExperienceMaker
from rlhf_megatron.models.config import OptimizerConfig
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.ppo import PpoStep, UpdateReport, score_metrics, update_kl_controller
from rlhf_megatron.rollout.contract import SamplingParameters
from rlhf_megatron.throughput import Throughput
from rlhf_megatron.weight_sync import SyncReport

FINITE_METRICS = (
    "ppo/policy_loss",
    "critic/value_loss",
    "grad_norm/actor",
    "grad_norm/critic",
)


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step brought."""

    metrics: dict[str, float]
    """All but times and memory; keys with an underscore before them are for `Throughput`."""
    experience: Experience


@dataclass(kw_only=True)
class TrainingStep:
    """The parts that a step runs through. Collective over the job."""

    config: Config
    ledger: PhaseLedger
    loader: PromptLoader
    maker: ExperienceMaker
    sampling: SamplingParameters
    weights: EngineWeights
    ppo: PpoStep
    kl: KlController
    bad_steps: BadSteps
    throughput: Throughput
    syncs_after: Callable[[int], bool]
    """Whether the engines are brought up to date after a step, or only woken."""
    job_group: dist.ProcessGroup
    device: torch.device

    def run(self, step: int) -> StepOutcome:
        """Raises StepAbandoned, JobError and InvariantError, each on all ranks alike."""
        config, phase = self.config, self.ledger.phase
        self.ledger.start_step(step)
        self.bad_steps.step_begins(step)
        rollouts = self.maker.roll_out(self.loader.next_step(), sampling=self.sampling, step=step)
        # Rewards of other processes are waited for below, after what does not need them.
        experience = None if self.maker.overlaps else self.maker.score(rollouts)
        self.weights.sleep()
        batch = rollouts.batch if experience is None else experience.batch
        plan = self.ppo.plan(batch, step=step)
        last_values = self._add_log_probs_and_values(batch, plan=plan[0])
        if experience is None:
            experience = self.maker.score(rollouts)
            if experience.num_dropped:  # the updates pack what is left of it anew
                batch = experience.batch
                last_values = last_values[experience.kept.to(last_values.device)]
                plan = self.ppo.plan(batch, step=step)
        metrics = score_metrics(batch) | experience.metrics()
        if self.bad_steps.accepts(batch, last_values=last_values):
            metrics |= self._check_agreement(batch, step=step)
        else:
            plan = []  # no update
        with phase("advantage"):
            metrics["kl/coef"] = self.kl.coefficient
            metrics |= self.ppo.advantages(
                batch, last_values=last_values, kl_coefficient=self.kl.coefficient
            )
            metrics |= self.ppo.off_policy(batch, version=step - 1)
        metrics["lr/critic"] = self._rate(config.critic.optimizer, step=step)
        with phase("update_critic"):
            critic = self.ppo.update_critic(batch, plan=plan, learning_rate=metrics["lr/critic"])
        metrics |= critic.metrics() | {"grad_norm/critic": critic.grad_norm}
        actor = UpdateReport()
        first_step = config.ppo.critic_warmup_steps + 1
        if step >= first_step:
            rate = self._rate(config.actor.optimizer, step=step, first_step=first_step)
            actor = self._update_actor(batch, plan=plan, rate=rate, is_first=step == first_step)
            metrics |= actor.metrics() | {
                "grad_norm/actor": actor.grad_norm,
                "lr/actor": rate,
                "ppo/stopped_early": float(actor.stopped_early),
                "ppo/optimizer_steps": float(len(actor.steps)),
            }
            update_kl_controller(self.kl, metrics=metrics, num_samples=len(batch))
        metrics |= self.bad_steps.step_ends()
        # Before weights that are spoilt reach the engines or a checkpoint.
        checks.check_finite(metrics, names=FINITE_METRICS)
        if config.faults.check_weights:
            self.check_weights(f"after the updates of step {step}", with_ref=False)
        metrics |= self._sync_after(step).metrics()
        metrics |= self.throughput.work(
            batch, actor_updates=actor.mini_batches, critic_updates=critic.mini_batches
        )
        metrics["_tokens"] = float(batch.num_tokens)
        return StepOutcome(metrics=metrics, experience=experience)

    def check_weights(self, when: str, *, with_ref: bool = True) -> None:
        """Raises JobError on all ranks where weights are not finite."""
        roles = {"actor": self.ppo.actor, "critic": self.ppo.critic}
        if with_ref and self.ppo.ref is not None:
            roles["ref"] = self.ppo.ref
        check_weights(roles, group=self.job_group, device=self.device, when=when)

    def _add_log_probs_and_values(self, batch: RaggedBatch, *, plan: list) -> torch.Tensor:
        """`old_logprobs`, `ref_logprobs` and `values`; returns the values at the last tokens."""
        ppo, phase = self.ppo, self.ledger.phase
        with phase("log_prob"):
            batch.response["old_logprobs"] = ppo.log_probs(ppo.actor, batch=batch, plan=plan)
        if ppo.ref is not None:
            with phase("ref_log_prob"):
                batch.response["ref_logprobs"] = ppo.log_probs(ppo.ref, batch=batch, plan=plan)
        with phase("value"):
            values = ppo.values(batch, plan=plan)
            batch.response["values"] = values["values"]
        return values["last"]

    def _update_actor(
        self, batch: RaggedBatch, *, plan: list, rate: float, is_first: bool
    ) -> UpdateReport:
        with self.ledger.phase("update_actor"):
            report = self.ppo.update_actor(
                batch, plan=plan, learning_rate=rate, kl_coefficient=self.kl.coefficient
            )
        if is_first and report.steps:
            checks.check_first_update(report.steps[0], precision=self.config.actor.precision)
        return report

    def _check_agreement(self, batch: RaggedBatch, *, step: int) -> dict[str, float]:
        precision = self.config.actor.precision
        if step == 1 and self.ppo.ref is not None and not self.config.ref.model:
            checks.check_reference(batch, precision=precision)
        return checks.check_parity(
            batch, config=self.config.parity, precision=precision, version=step - 1
        )

    def _sync_after(self, step: int) -> SyncReport:
        """Bring the engines up to date where it is due, else only wake them."""
        return self.weights.sync(version=step) if self.syncs_after(step) else self.weights.wake()

    def _rate(self, optimizer: OptimizerConfig, *, step: int, first_step: int = 1) -> float:
        """The rate of a role that is updated from `first_step` on."""
        return learning_rate(
            step - first_step,
            peak=optimizer.learning_rate,
            minimum=optimizer.minimum_learning_rate,
            schedule=optimizer.schedule,
            warmup_steps=optimizer.warmup_steps,
            total_steps=self.config.run.steps - first_step + 1,
        )
