"""The loop: prompts -> rollout -> rewards -> log-probs, values -> advantages -> updates -> reshard.

Every rank runs it alike; what rank 0 does beside is printing and writing.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from omegaconf import OmegaConf

from rlhf_megatron import assembly, checks
from rlhf_megatron.algorithms.kl import kl_controller
from rlhf_megatron.algorithms.schedule import learning_rate
from rlhf_megatron.architectures import read_architectures
from rlhf_megatron.bad_steps import BadSteps, check_weights
from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.checkpoint.hf_write import export_hf
from rlhf_megatron.checkpointing import Checkpointer
from rlhf_megatron.config import Config
from rlhf_megatron.data.exchange import gather_lists
from rlhf_megatron.data.loader import PromptLoader
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.engine_weights import EngineWeights
from rlhf_megatron.evaluation import Evaluator, append_evaluation
from rlhf_megatron.experience import Experience, ExperienceMaker
from rlhf_megatron.models.config import OptimizerConfig
from rlhf_megatron.observability.console import BeforeAfterLine, Console, SampleLine
from rlhf_megatron.observability.ledger import (
    PhaseLedger,
    StepLedger,
    append_ledger,
    merge_ledgers,
)
from rlhf_megatron.observability.metrics import MetricsWriter
from rlhf_megatron.observability.rollouts import RolloutRow, write_rollouts
from rlhf_megatron.ppo import PpoStep, UpdateReport, score_metrics, update_kl_controller
from rlhf_megatron.resume import ResumePoint
from rlhf_megatron.rollout.contract import SamplingParameters
from rlhf_megatron.run_state import Evaluations, RunState
from rlhf_megatron.start_check import check_start
from rlhf_megatron.stopping import RunStopped, StepAbandoned, StopAgreement
from rlhf_megatron.throughput import Throughput
from rlhf_megatron.warmup import SupervisedWarmup
from rlhf_megatron.weight_sync import SyncReport, WeightSync, role_layouts

logger = logging.getLogger(__name__)

BEFORE_AFTER_PROMPTS = 10
FINITE_METRICS = (
    "ppo/policy_loss",
    "critic/value_loss",
    "grad_norm/actor",
    "grad_norm/critic",
)


class Trainer:
    """A PPO run. Build it on every rank of an initialised job, then call `fit`."""

    def __init__(
        self,
        config: Config,
        *,
        context: DistributedContext,
        ledger: PhaseLedger,
        stop: StopAgreement,
        resume: ResumePoint | None = None,
    ) -> None:
        """`resume`: the checkpoint to go on from, in place of a beginning."""
        self.config, self.context, self.ledger = config, context, ledger
        self.stop, self.resume_point = stop, resume
        self.is_main = context.rank == 0
        self.job = context.job_group
        self.folder = Path(config.run.output_dir)
        ledger.start_step(0)
        self.console = Console(total_steps=config.run.steps, enabled=self.is_main)
        ledger.listeners.append(self.console)
        architectures = read_architectures(config)
        # Before anything slow: vLLM may be missing, or not know an argument.
        resolved = assembly.choose_engine(config, context=context, say=self.say)
        data = assembly.load_data(config, architectures=architectures)
        self.prompts = data.prompts
        scorer = assembly.build_scorer(
            config, prompts=data.prompts, rank=context.rank, device=context.device
        )
        self.loader = PromptLoader(
            data.prompts,
            prompts_per_step=config.rollout.prompts_per_step,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
        )
        self.writer = self._open_writer()

        groups = assembly.build_groups(config, context=context)
        self.actor = assembly.build_actor(
            config, arch=architectures.actor, groups=groups.actor, context=context
        )
        if resume is None:
            self._warm_up(data)
        self.critic = assembly.build_critic(
            config,
            arch=architectures.critic,
            groups=groups.critic,
            actor=self.actor,
            context=context,
        )
        self.ref: ModelEngine | None = None
        if architectures.ref is not None:
            self.ref = assembly.build_reference(
                config,
                arch=architectures.ref,
                groups=groups.ref,
                actor=self.actor,
                context=context,
            )
            if config.ref.offload:
                self.ref.move_weights(torch.device("cpu"))

        placement = assembly.choose_placement(
            config, resolved=resolved, actor=self.actor.model, context=context, say=self.say
        )
        self.num_engines = len(placement.engines)
        engine = assembly.build_rollout_engine(config, placement=placement, context=context)
        sync = WeightSync(
            self.actor.model,
            engine=engine,
            engine_layouts=placement.layouts,
            dtype=self.actor.model.config.params_dtype,
            config=config.reshard,
            rank=context.rank,
            job_group=self.job,
            device=context.device,
            node_of=context.node_of,
        )
        self.say(str(sync))
        self.weights = EngineWeights(
            engine,
            sync=sync,
            sleep_level=config.rollout.sleep_level,
            ledger=ledger,
            device=context.device,
        )
        stops = assembly.stop_token_ids(config, tokenizer=data.tokenizer, arch=architectures.actor)
        self.sampling = SamplingParameters(
            temperature=config.rollout.temperature,
            max_response_tokens=config.rollout.max_response_tokens,
            responses_per_prompt=config.rollout.responses_per_prompt,
            stop_token_ids=stops,
        )
        self.maker = ExperienceMaker(
            engine=engine,
            engines=placement.engines,
            tokenizer=data.tokenizer,
            scorer=scorer,
            on_error=config.reward.on_error,
            error_value=config.reward.error_value,
            reward=groups.reward,
            rank=context.rank,
            job_group=self.job,
            device=context.device,
            ledger=ledger,
        )
        self.evaluator: Evaluator | None = None
        if data.evaluation is not None:
            self.evaluator = Evaluator(
                config.evaluation,
                prompts=data.evaluation,
                maker=self.maker,
                max_response_tokens=config.rollout.max_response_tokens,
                stop_token_ids=stops,
            )
        self.bad_steps = BadSteps(
            config.faults,
            output_dir=self.folder,
            rank=context.rank,
            group=self.job,
            say=self.say,
            check_weights=self._check_weights,
        )
        self.ppo = PpoStep(
            config.ppo,
            actor=self.actor,
            critic=self.critic,
            ref=self.ref,
            temperature=config.rollout.temperature,
            max_response_tokens=config.rollout.max_response_tokens,
            seed=config.run.seed,
            guard=self.bad_steps,
        )
        self.kl = kl_controller(config.ppo.kl)
        self.throughput = Throughput(config, architectures=architectures, context=context)
        self.evaluations = Evaluations()
        self.checkpointer = self._build_checkpointer()
        ledger.listeners += [stop, self.checkpointer]

    def fit(self) -> None:
        """Train up to step `run.steps`, evaluate and save on the way, export at the end.

        Raises RunStopped, with the state saved, where the run is asked to stop.
        """
        steps = self.config.run.steps
        for step in range(self._begin() + 1, steps + 1):
            self.stop.step_begins()
            try:
                metrics = self.train_step(step)
            except StepAbandoned as abandoned:
                self.stop.reason = self.stop.reason or str(abandoned)
                self.checkpointer.stop()
            self.stop.step_ends()
            if self._evaluates_after(step):
                self._evaluate(step)
                last = self.evaluations.last
                metrics |= last.metrics if last is not None else {}
            self._finish_step(step, metrics)
            self.checkpointer.after_step(step)
        self._finish()

    def _begin(self) -> int:
        """Bring the engines to the present weights, those of a checkpoint where there is one.
        Returns the step they are of."""
        self._stop_early()
        point = self.resume_point
        if point is not None:
            self.checkpointer.resume(point)
            self.weights.sync(version=point.step)
            self._check_start(version=point.step)
            if not self._syncs_after(point.step):
                self.say(
                    f"reshard.interval={self.config.reshard.interval}: the engines start with the "
                    f"weights of step {point.step}; the run that never stopped had older ones"
                )
            return point.step
        self.weights.sync(version=0)
        self._check_start(version=0)
        self._evaluate(0)
        self._write_ledger()
        self.checkpointer.begins()
        return 0

    def _stop_early(self) -> None:
        """Raises RunStopped where the run is asked to stop before it has anything to save."""
        if self.stop.agreed():
            raise RunStopped(f"stopped by {self.stop.reason} during the setup; nothing was lost")

    def _build_checkpointer(self) -> Checkpointer:
        config = self.config
        ref_is_lost = config.warmup.steps > 0 and not config.ref.model
        run = RunState(
            roles={"actor": self.actor, "critic": self.critic},
            ref=self.ref if ref_is_lost else None,
            parts={
                "loader": self.loader,
                "kl": self.kl,
                "evaluations": self.evaluations,
                "bad_steps": self.bad_steps,
            },
        )
        return Checkpointer(
            config,
            run=run,
            stop=self.stop,
            context=self.context,
            ledger=self.ledger,
            say=self.say,
        )

    def train_step(self, step: int) -> dict[str, float]:
        """One PPO step; the metrics of all but its times and memory."""
        config, phase = self.config, self.ledger.phase
        self.ledger.start_step(step)
        self.bad_steps.step_begins(step)
        rollouts = self.maker.roll_out(self.loader.next_step(), sampling=self.sampling, step=step)
        # Rewards of other processes are waited for below, after what does not need them.
        experience = None if self.maker.overlaps else self.maker.score(rollouts)
        self.weights.sleep()
        batch = rollouts.batch if experience is None else experience.batch
        plan = self.ppo.plan(batch, step=step)
        with phase("log_prob"):
            batch.response["old_logprobs"] = self.ppo.log_probs(
                self.actor, batch=batch, plan=plan[0]
            )
        if self.ref is not None:
            with phase("ref_log_prob"), self._on_device(self.ref):
                batch.response["ref_logprobs"] = self.ppo.log_probs(
                    self.ref, batch=batch, plan=plan[0]
                )
        with phase("value"):
            values = self.ppo.values(batch, plan=plan[0])
            batch.response["values"] = values["values"]
        if experience is None:
            experience = self.maker.score(rollouts)
            if experience.num_dropped:  # the updates pack what is left of it anew
                batch = experience.batch
                values["last"] = values["last"][experience.kept.to(values["last"].device)]
                plan = self.ppo.plan(batch, step=step)
        metrics = score_metrics(batch) | experience.metrics()
        if self.bad_steps.accepts(batch, last_values=values["last"]):
            metrics |= self._check_agreement(batch, step=step)
        else:
            plan = []  # no update
        with phase("advantage"):
            metrics["kl/coef"] = self.kl.coefficient
            metrics |= self.ppo.advantages(
                batch, last_values=values["last"], kl_coefficient=self.kl.coefficient
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
            self._check_weights(f"after the updates of step {step}", with_ref=False)
        metrics |= self._sync_after(step).metrics()
        self._show_responses(experience, step=step)
        work = self.throughput.work(
            batch, actor_updates=actor.mini_batches, critic_updates=critic.mini_batches
        )
        return metrics | {"_tokens": float(batch.num_tokens)} | work

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

    def _check_weights(self, when: str, *, with_ref: bool = True) -> None:
        """Raises JobError on all ranks where weights are not finite."""
        roles = {"actor": self.actor, "critic": self.critic}
        if with_ref and self.ref is not None:
            roles["ref"] = self.ref
        check_weights(roles, group=self.job, device=self.context.device, when=when)

    def _check_agreement(self, batch: RaggedBatch, *, step: int) -> dict[str, float]:
        precision = self.config.actor.precision
        if step == 1 and self.ref is not None and not self.config.ref.model:
            checks.check_reference(batch, precision=precision)
        return checks.check_parity(
            batch, config=self.config.parity, precision=precision, version=step - 1
        )

    def _check_start(self, *, version: int) -> None:
        """The engines hold the actor's weights `version`."""
        config = self.config
        if not config.parity.at_start:
            return
        report = check_start(
            self.weights,
            rank=self.context.rank,
            rows=self.prompts.rows,
            num_engines=self.num_engines,
            sampling=self.sampling,
            log_probs=lambda batch: self.ppo.log_probs(
                self.actor, batch=batch, plan=[list(range(len(batch)))]
            ),
            group=self.job,
            config=config.parity,
            precision=config.actor.precision,
            version=version,
        )
        self.say(str(report))

    def _evaluates_after(self, step: int) -> bool:
        config = self.config
        return self.evaluator is not None and (
            step == config.run.steps or step % config.evaluation.interval_steps == 0
        )

    def _sync_after(self, step: int) -> SyncReport:
        """Bring the engines up to date where it is due, else only wake them."""
        return self.weights.sync(version=step) if self._syncs_after(step) else self.weights.wake()

    def _syncs_after(self, step: int) -> bool:
        """An evaluation measures the actor as it is; a checkpoint holds no older weights, which the
        engines of a resumed run would need."""
        saves = self.config.checkpoint.interval_steps
        return (
            step % self.config.reshard.interval == 0
            or self._evaluates_after(step)
            or (saves > 0 and step % saves == 0)
        )

    @contextmanager
    def _on_device(self, ref: ModelEngine) -> Iterator[None]:
        """With ref.offload the reference's weights are on the device only while they are used."""
        if not self.config.ref.offload:
            yield
            return
        ref.move_weights(self.context.device)
        yield
        ref.move_weights(torch.device("cpu"))

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

    def _warm_up(self, data: assembly.Data) -> None:
        config = self.config.warmup
        if config.steps == 0:
            return
        warmup = SupervisedWarmup(
            self.actor,
            demonstrations=data.demonstrations,
            config=config,
            micro_batch_tokens=self.config.ppo.micro_batch_tokens,
            seed=self.config.run.seed,
        )
        self.say(f"supervised warm-up: {config.steps} steps on {len(data.demonstrations)} examples")
        with self.ledger.phase("warmup"):
            for step in range(1, config.steps + 1):
                loss = warmup.step()
                self.ledger.go_on()
                checks.check_finite({"loss": loss}, names=("loss",))
                self._stop_early()
                if step == 1 or step % max(config.steps // 5, 1) == 0:
                    self.say(f"  warm-up step {step}: loss {loss:.4f}")
        self.actor.reset_optimizer()

    def _evaluate(self, step: int) -> None:
        """Evaluate the engines' present weights; keep the actor if it is the best so far."""
        if self.evaluator is None:
            return
        report = self.evaluator.run(step=step)
        if self.is_main:
            append_evaluation(self.folder, report=report)
        self.say(f"evaluation after step {step}: mean reward {report.reward_mean:.4f}")
        if self.evaluations.add(report) and step > 0 and self.config.evaluation.keep_best:
            self._export(self.folder / "checkpoints" / "best", overwrite=True)

    def _write_ledger(self) -> StepLedger:
        """The records of all ranks since the last step."""
        ledger = merge_ledgers(gather_lists([self.ledger.finish_step()], group=self.job))
        if self.is_main:
            append_ledger(self.folder, ledger=ledger)
        return ledger

    def _finish_step(self, step: int, metrics: dict[str, float]) -> None:
        """Write and show the step."""
        metrics |= self._write_ledger().metrics() | self.checkpointer.take_metrics()
        metrics |= self.throughput.metrics(metrics)
        metrics = {name: value for name, value in metrics.items() if not name.startswith("_")}
        if self.writer is not None:
            self.writer.write(step, metrics=metrics)
            self.console.step_table(step, metrics=metrics)

    def _show_responses(self, experience: Experience, *, step: int) -> None:
        options = self.config.logging
        if not self.is_main:
            return
        if options.rollouts_interval_steps and step % options.rollouts_interval_steps == 0:
            write_rollouts(self.folder, step=step, rows=experience.rows)
        self.console.samples(
            [
                SampleLine(prompt=row.prompt, response=row.response, reward=row.reward)
                for row in experience.rows
                if row.reward is not None
            ][: options.sample_responses]
        )

    def _finish(self) -> None:
        self.checkpointer.finish()
        first, last = self.evaluations.first, self.evaluations.last
        if self.is_main and first is not None and last is not None:
            self.console.message("\nheld-out prompts before and after:")
            self.console.before_after(_before_after(first.rows, after=last.rows))
        if self.config.export.final:
            self._export(self.folder / "hf", overwrite=True)
        exported = self.config.export.final
        self.say(_where_to_look(self.folder, exported=exported, evaluations=self.evaluations))
        if self.writer is not None:
            self.writer.close()
        self.console.close()

    def _export(self, target: Path, *, overwrite: bool) -> None:
        model = self.actor.model
        export_hf(
            target,
            arch=model.arch,
            head="lm",
            layouts=role_layouts(model),
            parameters=model.parameters(),
            rank=self.context.rank,
            group=self.job,
            template_dir=self.config.actor.model,
            dtype=model.config.params_dtype,
            overwrite=overwrite,
        )

    def _open_writer(self) -> MetricsWriter | None:
        if not self.is_main:
            return None
        resolved = OmegaConf.to_container(OmegaConf.structured(self.config))
        assert isinstance(resolved, dict)
        return MetricsWriter(
            self.folder,
            config=self.config.logging,
            run_name=self.config.logging.wandb.name or self.config.run.name,
            resolved_config={str(key): value for key, value in resolved.items()},
            first_step=self.resume_point.step + 1 if self.resume_point else 1,
        )

    def say(self, text: str) -> None:
        """Print on rank 0 and keep in the logs."""
        logger.info(text)
        self.console.message(text)


def _before_after(before: list[RolloutRow], *, after: list[RolloutRow]) -> list[BeforeAfterLine]:
    """The first response to each of the first prompts, then and now."""
    then = {row.prompt_id: row for row in before if row.sample_index == 0}
    lines = []
    for row in after:
        old = then.get(row.prompt_id)
        if row.sample_index or old is None or old.reward is None or row.reward is None:
            continue  # dropped then or now
        lines.append(
            BeforeAfterLine(
                prompt=row.prompt,
                before=old.response,
                before_reward=old.reward,
                after=row.response,
                after_reward=row.reward,
            )
        )
    return lines[:BEFORE_AFTER_PROMPTS]


def _where_to_look(folder: Path, *, exported: bool, evaluations: Evaluations) -> str:
    lines = ["", f"run folder: {folder}"]
    lines.append("  metrics.jsonl     one line per step")
    lines.append("  rollouts/         every sampled response with its reward")
    if evaluations.best_step:
        lines.append(
            f"  checkpoints/best  the actor after step {evaluations.best_step}, held-out reward "
            f"{evaluations.best_reward_mean:.4f}"
        )
    if exported:
        lines.append("  hf/               the trained model, for transformers and vLLM")
    return "\n".join(lines)
