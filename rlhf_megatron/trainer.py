"""The loop: prompts -> rollout -> rewards -> log-probs, values -> advantages -> updates -> reshard.

Every rank runs it alike; what rank 0 does beside is printing and writing.
"""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rlhf_megatron import assembly, checks
from rlhf_megatron.algorithms.kl import kl_controller
from rlhf_megatron.architectures import Architectures, read_architectures
from rlhf_megatron.bad_steps import BadSteps
from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.checkpoint.hf_write import export_hf
from rlhf_megatron.checkpointing import Checkpointer
from rlhf_megatron.config import Config
from rlhf_megatron.data.exchange import gather_lists
from rlhf_megatron.data.loader import PromptLoader
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.engine.offload import WEIGHTS
from rlhf_megatron.engine_weights import EngineWeights
from rlhf_megatron.evaluation import Evaluator, append_evaluation
from rlhf_megatron.experience import ExperienceMaker
from rlhf_megatron.memory_watch import watch_memory
from rlhf_megatron.observability.ledger import (
    PhaseLedger,
    StepLedger,
    append_ledger,
    merge_ledgers,
)
from rlhf_megatron.offloading import Offloader
from rlhf_megatron.ppo import PpoStep
from rlhf_megatron.resume import ResumePoint
from rlhf_megatron.rollout.contract import SamplingParameters
from rlhf_megatron.run_output import RunOutput
from rlhf_megatron.run_state import Evaluations, RunState
from rlhf_megatron.start_check import check_start
from rlhf_megatron.step import TrainingStep
from rlhf_megatron.stopping import RunStopped, StepAbandoned, StopAgreement
from rlhf_megatron.throughput import Throughput
from rlhf_megatron.warmup import SupervisedWarmup
from rlhf_megatron.weight_sync import WeightSync, role_layouts

logger = logging.getLogger(__name__)


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
        self.output = RunOutput(config, is_main=self.is_main)
        self.folder, self.say = self.output.folder, self.output.say
        ledger.start_step(0)
        self.offload = Offloader(config, device=context.device, ledger=ledger)
        ledger.listeners += [self.output.console, self.offload]
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
        self.output.open(first_step=resume.step + 1 if resume is not None else 1)

        groups = assembly.build_groups(config, context=context)
        self.actor = assembly.build_actor(
            config, arch=architectures.actor, groups=groups.actor, context=context
        )
        if resume is None:
            self._warm_up(data)
        self.offload.add("actor", self.actor)
        with self.actor.memory.on_device(WEIGHTS):
            self._build_other_roles(architectures, groups=groups)
        if self.offload.is_used:
            self.say(str(self.offload))

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
            after_sync=self.offload.release,
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
            check_weights=lambda when: self.step.check_weights(when),
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
        self.step = TrainingStep(
            config=config,
            ledger=ledger,
            loader=self.loader,
            maker=self.maker,
            sampling=self.sampling,
            weights=self.weights,
            ppo=self.ppo,
            kl=self.kl,
            bad_steps=self.bad_steps,
            throughput=self.throughput,
            syncs_after=self._syncs_after,
            job_group=self.job,
            device=context.device,
        )
        self.evaluations = Evaluations()
        self.checkpointer = self._build_checkpointer()
        self.monitor = watch_memory(
            config,
            context=context,
            ledger=ledger,
            roles=[role for role in (self.actor, self.critic, self.ref) if role is not None],
            say=self.say,
        )
        ledger.listeners += [stop, self.checkpointer]

    def _build_other_roles(self, architectures: Architectures, *, groups: assembly.Groups) -> None:
        """Critic and reference, which may begin with the actor's weights."""
        config = self.config
        self.critic = assembly.build_critic(
            config,
            arch=architectures.critic,
            groups=groups.critic,
            actor=self.actor,
            context=self.context,
        )
        self.offload.add("critic", self.critic)
        self.ref: ModelEngine | None = None
        if architectures.ref is not None:
            self.ref = assembly.build_reference(
                config,
                arch=architectures.ref,
                groups=groups.ref,
                actor=self.actor,
                context=self.context,
            )
            self.offload.add("ref", self.ref)

    def fit(self) -> None:
        """Train up to step `run.steps`, evaluate and save on the way, export at the end.

        Raises RunStopped, with the state saved, where the run is asked to stop.
        """
        steps, last_step = self.config.run.steps, self._begin()
        # What is there now stays. A full collection would walk through all of it, 0.3 s a time, on
        # each rank at another moment.
        gc.collect()
        gc.freeze()
        for step in range(last_step + 1, steps + 1):
            self.stop.step_begins()
            try:
                outcome = self.step.run(step)
            except StepAbandoned as abandoned:
                self.stop.step_abandoned(str(abandoned))
                self.checkpointer.stop()
            self.stop.step_ends()
            self.output.responses(outcome.experience, step=step)
            metrics = outcome.metrics
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
        if self.offload.is_used:
            self.weights.sleep()  # the engine has taken what the roles have left
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

    def _check_start(self, *, version: int) -> None:
        """The engines hold the actor's weights `version`."""
        config = self.config
        if not config.parity.at_start:
            return

        def log_probs(batch: RaggedBatch) -> torch.Tensor:
            with self._actor_on_device(version=version):
                return self.ppo.log_probs(self.actor, batch=batch, plan=[list(range(len(batch)))])

        report = check_start(
            self.weights,
            rank=self.context.rank,
            rows=self.prompts.rows,
            num_engines=self.num_engines,
            sampling=self.sampling,
            log_probs=log_probs,
            group=self.job,
            config=config.parity,
            precision=config.actor.precision,
            version=version,
        )
        self.say(str(report))

    @contextmanager
    def _actor_on_device(self, *, version: int) -> Iterator[None]:
        """Outside its phases, while the engine, which has weights `version`, is awake."""
        if self.actor.memory.is_here(WEIGHTS):
            yield
            return
        with self.weights.asleep(version=version), self.actor.memory.on_device(WEIGHTS):
            yield

    def _evaluates_after(self, step: int) -> bool:
        config = self.config
        return self.evaluator is not None and (
            step == config.run.steps or step % config.evaluation.interval_steps == 0
        )

    def _syncs_after(self, step: int) -> bool:
        """An evaluation measures the actor as it is; a checkpoint holds no older weights, which the
        engines of a resumed run would need."""
        saves = self.config.checkpoint.interval_steps
        return (
            step % self.config.reshard.interval == 0
            or self._evaluates_after(step)
            or (saves > 0 and step % saves == 0)
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
            with self._actor_on_device(version=step):
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
        self.output.step(step, metrics=metrics)
        self.monitor.after_step(step)

    def _finish(self) -> None:
        self.checkpointer.finish()
        self.output.before_and_after(self.evaluations)
        if self.config.export.final:
            with self._actor_on_device(version=self.config.run.steps):
                self._export(self.folder / "hf", overwrite=True)
        self.output.close(self.evaluations)

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
