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
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.ppo import PpoStep, score_metrics, update_kl_controller
from rlhf_megatron.role_exchange import RoleExchange
from rlhf_megatron.rollout.contract import SamplingParameters
from rlhf_megatron.throughput import Throughput
from rlhf_megatron.updates import MiniBatch, UpdateReport
from rlhf_megatron.weight_sync import SyncReport

FINITE_METRICS = (
    "ppo/policy_loss",
    "critic/value_loss",
    "grad_norm/actor",
    "grad_norm/critic",
)


Plan = list[MiniBatch]
"""The mini-batches of an epoch."""

Outputs = dict[str, dict[str, torch.Tensor]]
"""Role -> name -> what its model says of each response token, or of each sample."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What a step brought."""

    metrics: dict[str, float]
    """All but times and memory; keys with an underscore before them are for `Throughput`."""
    experience: Experience


@dataclass(frozen=True, kw_only=True)
class Updates:
    """What a step's updates did, as all ranks know it."""

    critic: UpdateReport
    actor: UpdateReport
    sync: SyncReport


@dataclass(kw_only=True)
class TrainingStep:
    """The parts that a step runs through. Collective over the job.

    Each rank enters the phases of the roles that it holds, in the one order that all have; where
    roles have ranks of their own, all meet in `exchange` to tell each other what came of it.
    """

    config: Config
    ledger: PhaseLedger
    loader: PromptLoader
    maker: ExperienceMaker
    sampling: SamplingParameters
    weights: EngineWeights
    ppo: PpoStep
    exchange: RoleExchange
    kl: KlController
    bad_steps: BadSteps
    throughput: Throughput
    syncs_after: Callable[[int], bool]
    """Whether the engines are brought up to date after a step, or only woken."""
    updates_begin: Callable[[], None]
    """Called on all ranks where the step may no longer be given up."""
    job_group: dist.ProcessGroup
    device: torch.device

    def run(self, step: int) -> StepOutcome:
        """Raises StepAbandoned, JobError and InvariantError, each on all ranks alike; what a role's
        updates raise, on all ranks of the role."""
        self.ledger.start_step(step)
        self.bad_steps.step_begins(step)
        rollouts = self.maker.roll_out(self.loader.next_step(), sampling=self.sampling, step=step)
        # Rewards of other processes are waited for below, after what does not need them.
        experience = None if self.maker.overlaps else self.maker.score(rollouts)
        self.weights.sleep()
        batch = rollouts.batch if experience is None else experience.batch
        plan = self.ppo.plan(batch, step=step)
        outputs = self._own_outputs(batch, plan=plan[0])
        with self.exchange.joined():
            last_values = self._tell_outputs(batch, own=outputs)
        if experience is None:
            experience = self.maker.score(rollouts)
            if experience.num_dropped:  # the updates pack what is left of it anew
                batch = experience.batch
                last_values = last_values[experience.kept.to(last_values.device)]
                plan = self.ppo.plan(batch, step=step)
        metrics = score_metrics(batch) | experience.metrics()
        plan, found = self._advantages(batch, last_values=last_values, plan=plan, step=step)
        metrics |= found
        self.updates_begin()
        critic = self._update_critic(batch, plan=plan, step=step)
        actor = self._update_actor(batch, plan=plan, step=step)
        sync = self._sync_after(step)
        with self.exchange.joined():
            updates = self._tell_updates(critic=critic, actor=actor, sync=sync)
        metrics |= self._after_updates(batch, updates=updates, metrics=metrics, step=step)
        return StepOutcome(metrics=metrics, experience=experience)

    def check_weights(self, when: str, role: str = "") -> None:
        """Raises JobError where weights are not finite, on all ranks of the role, or of the job."""
        ppo = self.ppo
        here = {"actor": ppo.actor, "critic": ppo.critic, "ref": ppo.ref}
        roles = {n: e for n, e in here.items() if e is not None and role in ("", n)}
        group = roles[role].model.groups.everyone if role else self.job_group
        check_weights(roles, group=group, device=self.device, when=when)

    def _own_outputs(self, batch: RaggedBatch, *, plan: Plan) -> Outputs:
        """What the present weights of this rank's roles say of the batch, by role."""
        ppo, phase, found = self.ppo, self.ledger.phase, Outputs()
        if ppo.actor is not None:
            with phase("log_prob"):
                if self._is_shared:
                    both = ppo.log_probs_and_values(batch, plan=plan)
                    found["actor"] = {"old_logprobs": both.pop("logprobs"), **both}
                else:
                    logprobs = ppo.log_probs(ppo.actor, batch=batch, plan=plan)
                    found["actor"] = {"old_logprobs": logprobs}
        if ppo.ref is not None:
            with phase("ref_log_prob"):
                found["ref"] = {"ref_logprobs": ppo.log_probs(ppo.ref, batch=batch, plan=plan)}
        if ppo.critic is not None:
            with phase("value"):
                found["critic"] = ppo.values(batch, plan=plan)
        return found

    def _tell_outputs(self, batch: RaggedBatch, *, own: Outputs) -> torch.Tensor:
        """Adds `old_logprobs`, `ref_logprobs` and `values` on all ranks; returns the values at the
        last tokens."""
        count = batch.num_response_tokens
        sizes = {"actor": {"old_logprobs": count}, "ref": {"ref_logprobs": count}, "critic": {}}
        sizes["actor" if self._is_shared else "critic"] |= {"values": count, "last": len(batch)}
        last_values = torch.empty(0)
        for role, fields in sizes.items():
            if role in self.exchange.placement.ranks:
                found = self.exchange.tensors(role, own.get(role), sizes=fields)
                last_values = found.pop("last", last_values)
                batch.response.update(found)
        return last_values

    def _advantages(
        self, batch: RaggedBatch, *, last_values: torch.Tensor, plan: list[Plan], step: int
    ) -> tuple[list[Plan], dict[str, float]]:
        """Adds what the updates need; the plan that they follow, empty where they are left out, and
        the metrics. The same on all ranks."""
        metrics: dict[str, float] = {}
        if self.bad_steps.accepts(batch, last_values=last_values):
            metrics |= self._check_agreement(batch, step=step)
        else:
            plan = []
        with self.ledger.phase("advantage"):
            metrics["kl/coef"] = self.kl.coefficient
            metrics |= self.ppo.advantages(
                batch, last_values=last_values, kl_coefficient=self.kl.coefficient
            )
            metrics |= self.ppo.off_policy(batch, version=step - 1)
        return plan, metrics

    def _update_critic(
        self, batch: RaggedBatch, *, plan: list[Plan], step: int
    ) -> UpdateReport | None:
        """None on a rank without the critic."""
        if self.ppo.critic is None:
            return None
        rate = self._rate("critic", step=step)
        with self.ledger.phase("update_critic"):
            report = self.ppo.update_critic(batch, plan=plan, learning_rate=rate)
        self._check_update("critic", report=report, step=step)
        return report

    def _update_actor(
        self, batch: RaggedBatch, *, plan: list[Plan], step: int
    ) -> UpdateReport | None:
        """None on a rank without the actor. Nothing is done in the critic's warm-up."""
        if self.ppo.actor is None:
            return None
        if step < self._first_actor_step:
            return UpdateReport()
        rate = self._rate("actor", step=step)
        with self.ledger.phase("update_actor"):
            report = self.ppo.update_actor(
                batch, plan=plan, learning_rate=rate, kl_coefficient=self.kl.coefficient
            )
        if step == self._first_actor_step and report.steps:
            checks.check_first_update(report.steps[0], precision=self.config.actor.precision)
        self._check_update("actor", report=report, step=step)
        return report

    def _check_update(self, role: str, *, report: UpdateReport, step: int) -> None:
        """Before weights that are spoilt reach the engines or a checkpoint."""
        metrics = report.metrics() | {f"grad_norm/{role}": report.grad_norm}
        checks.check_finite(metrics, names=FINITE_METRICS)
        if self.config.faults.check_weights:
            self.check_weights(f"after the updates of step {step}", role)

    def _sync_after(self, step: int) -> SyncReport:
        """Bring the engines up to date where it is due, else only wake them."""
        self.exchange.await_actor()
        return self.weights.sync(version=step) if self.syncs_after(step) else self.weights.wake()

    def _tell_updates(
        self, *, critic: UpdateReport | None, actor: UpdateReport | None, sync: SyncReport
    ) -> Updates:
        """What the roles' ranks know of their updates, on all ranks."""
        return Updates(
            critic=UpdateReport() if self._is_shared else self._tell_update("critic", own=critic),
            actor=self._tell_update("actor", own=actor),
            sync=self.exchange.figures("actor", sync if actor is not None else None),
        )

    def _tell_update(self, role: str, *, own: UpdateReport | None) -> UpdateReport:
        judged = None if own is None else (own, self.bad_steps.judgements(role))
        report, judgements = self.exchange.figures(role, judged)
        if own is None:
            self.bad_steps.take_over(role, judgements=judgements)
        return report

    def _after_updates(
        self, batch: RaggedBatch, *, updates: Updates, metrics: dict[str, float], step: int
    ) -> dict[str, float]:
        """Metrics of the updates; steers the KL coefficient by the step's `metrics`. The same on
        all ranks."""
        critic, actor = updates.critic, updates.actor
        found: dict[str, float] = {}
        if not self._is_shared:
            found = critic.metrics() | critic.packing_metrics("critic")
            found |= {
                "grad_norm/critic": critic.grad_norm,
                "lr/critic": self._rate("critic", step=step),
            }
        if step >= self._first_actor_step:
            found |= actor.metrics() | actor.packing_metrics("actor")
            found |= {
                "grad_norm/actor": actor.grad_norm,
                "lr/actor": self._rate("actor", step=step),
                "ppo/stopped_early": float(actor.stopped_early),
                "ppo/optimizer_steps": float(len(actor.steps)),
            }
            update_kl_controller(self.kl, metrics=metrics, num_samples=len(batch))
        found |= self.bad_steps.step_ends()
        found |= updates.sync.metrics()
        found |= self.throughput.work(
            batch, actor_updates=actor.mini_batches, critic_updates=critic.mini_batches
        )
        return found | {"_tokens": float(batch.num_tokens)}

    def _check_agreement(self, batch: RaggedBatch, *, step: int) -> dict[str, float]:
        precision = self.config.actor.precision
        has_ref = "ref" in self.exchange.placement.ranks
        if step == 1 and has_ref and not self.config.ref.model:
            checks.check_reference(batch, precision=precision)
        return checks.check_parity(
            batch, config=self.config.parity, precision=precision, version=step - 1
        )

    @property
    def _is_shared(self) -> bool:
        """Whether the critic is a head on the actor."""
        return self.config.critic.shared_backbone

    @property
    def _first_actor_step(self) -> int:
        return self.config.ppo.critic_warmup_steps + 1

    def _rate(self, role: str, *, step: int) -> float:
        """The learning rate of a role, whose schedule begins with its first update."""
        config = self.config
        optimizer = config.actor.optimizer if role == "actor" else config.critic.optimizer
        first_step = self._first_actor_step if role == "actor" else 1
        return learning_rate(
            step - first_step,
            peak=optimizer.learning_rate,
            minimum=optimizer.minimum_learning_rate,
            schedule=optimizer.schedule,
            warmup_steps=optimizer.warmup_steps,
            total_steps=config.run.steps - first_step + 1,
        )
