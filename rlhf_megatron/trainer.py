"""The loop: prompts -> rollout -> rewards -> log-probs, values -> advantages -> updates -> reshard.

Every rank runs it alike; what rank 0 does beside is printing and writing.
"""

import gc
import logging
from typing import Any

import torch

from rlhf_megatron import assembly, checks
from rlhf_megatron.actor_weights import ActorWeights
from rlhf_megatron.algorithms.kl import kl_controller
from rlhf_megatron.architectures import Architectures, read_architectures
from rlhf_megatron.bad_steps import BadSteps, Judges
from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.checkpointing import Checkpointer
from rlhf_megatron.config import Config
from rlhf_megatron.data.exchange import gather_lists
from rlhf_megatron.data.loader import PromptLoader
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.engine_weights import EngineWeights
from rlhf_megatron.evaluation import Evaluator, append_evaluation
from rlhf_megatron.experience import ExperienceMaker
from rlhf_megatron.memory_watch import watch_memory
from rlhf_megatron.observability.idle import idle_metrics
from rlhf_megatron.observability.ledger import (
    PhaseLedger,
    StepLedger,
    append_ledger,
    merge_ledgers,
)
from rlhf_megatron.observability.profiler import watch_phases
from rlhf_megatron.offloading import Offloader, offloaded_kinds
from rlhf_megatron.pipelined_step import InFlight, PipelinedStep
from rlhf_megatron.placed_role import PlacedRole
from rlhf_megatron.placement import RolloutPlacement
from rlhf_megatron.ppo import PpoStep
from rlhf_megatron.resume import ResumePoint
from rlhf_megatron.role_exchange import RoleExchange
from rlhf_megatron.role_ranks import role_placement
from rlhf_megatron.rollout.contract import RolloutEngine, SamplingParameters
from rlhf_megatron.run_output import RunOutput
from rlhf_megatron.run_state import Evaluations, RunState
from rlhf_megatron.shared_backbone import shared_loss_weight
from rlhf_megatron.start_check import check_start
from rlhf_megatron.step import TrainingStep
from rlhf_megatron.stopping import RunStopped, StepAbandoned, StopAgreement
from rlhf_megatron.throughput import Throughput
from rlhf_megatron.warmup import SupervisedWarmup
from rlhf_megatron.weight_sync import WeightSync

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
        watch_phases(ledger, config=config.profile, output_dir=self.folder, device=context.device)
        ledger.listeners += [self.output.console, self.offload]
        architectures = read_architectures(config)
        # Before anything slow: vLLM may be missing, or not know an argument.
        resolved = assembly.choose_engine(
            config, arch=architectures.actor, context=context, say=self.say
        )
        data = assembly.load_data(config, architectures=architectures)
        self.prompts = data.prompts
        placed = role_placement(config, world_size=context.world_size)
        scorer = None
        if context.rank in placed.ranks["reward"]:
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
        self.exchange = RoleExchange(
            groups.placement, groups=groups.exchange, rank=context.rank, ledger=ledger
        )
        self.actor = assembly.build_actor(
            config, arch=architectures.actor, groups=groups, context=context
        )
        if resume is None:
            self._warm_up(data)
        self._offload(self.actor)
        with self.actor.weights_here():
            self._build_other_roles(architectures, groups=groups)
        if self.offload.is_used:
            self.say(str(self.offload))

        placement = assembly.choose_placement(
            config, resolved=resolved, actor=self.actor, context=context, say=self.say
        )
        self.num_engines = len(placement.engines)
        engine = assembly.build_rollout_engine(config, placement=placement, context=context)
        self.weights = self._build_engine_weights(engine, placement=placement, groups=groups)
        self.actor_weights = ActorWeights(
            self.actor,
            config=config,
            engine_weights=self.weights,
            is_split=self.exchange.is_split,
            group=self.job,
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
            overlaps=assembly.scores_in_background(config),
            on_error=config.reward.on_error,
            error_value=config.reward.error_value,
            exchange=self.exchange,
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
            check_weights=lambda when, role: self.step.check_weights(when, role),
            judges=self._judges(),
        )
        self.ppo = PpoStep(
            config.ppo,
            actor=self.actor.engine,
            critic=self.critic.engine if self.critic is not None else None,
            ref=self.ref.engine if self.ref is not None else None,
            temperature=config.rollout.temperature,
            max_response_tokens=config.rollout.max_response_tokens,
            seed=config.run.seed,
            guard=self.bad_steps,
            shared_loss_weight=shared_loss_weight(config),
        )
        self.kl = kl_controller(config.ppo.kl)
        self.throughput = Throughput(config, architectures=architectures, context=context)
        self.step = self._build_step()
        self.evaluations = Evaluations()
        self.checkpointer = self._build_checkpointer()
        self.monitor = watch_memory(
            config,
            context=context,
            ledger=ledger,
            roles=self._engines(),
            engine=self.weights.engine,
            say=self.say,
        )
        ledger.joint_listeners += [stop, self.checkpointer]

    def _build_other_roles(self, architectures: Architectures, *, groups: assembly.Groups) -> None:
        """Critic and reference, which may begin with the actor's weights."""
        config = self.config
        self.critic = assembly.build_critic(
            config,
            arch=architectures.critic,
            groups=groups,
            actor=self.actor,
            context=self.context,
        )
        if self.critic is not None:
            self._offload(self.critic)
        self.ref: PlacedRole | None = None
        if architectures.ref is not None:
            self.ref = assembly.build_reference(
                config,
                arch=architectures.ref,
                groups=groups,
                actor=self.actor,
                context=self.context,
            )
            self._offload(self.ref)

    def _offload(self, role: PlacedRole) -> None:
        if role.engine is not None:
            self.offload.add(role.name, role.engine)

    def _engines(self) -> list[ModelEngine]:
        """Of the roles that this rank has a part of."""
        roles = [role for role in (self.actor, self.critic, self.ref) if role is not None]
        return [role.engine for role in roles if role.engine is not None]

    def _build_engine_weights(
        self,
        engine: RolloutEngine | None,
        *,
        placement: RolloutPlacement,
        groups: assembly.Groups,
    ) -> EngineWeights:
        config, context, sync = self.config, self.context, None
        group = groups.exchange.sync if groups.placement.is_split else self.job
        if group is not None:
            sync = WeightSync(
                self.actor,
                engine=engine,
                engine_layouts=placement.layouts,
                config=config.reshard,
                rank=context.rank,
                group=group,
                device=context.device,
                node_of=context.node_of,
            )
            self.say(str(sync))
        return EngineWeights(
            engine,
            sync=sync,
            sleep_level=config.rollout.sleep_level,
            ledger=self.ledger,
            device=context.device,
            after_sync=self.offload.release,
        )

    def _judges(self) -> dict[str, Judges]:
        """Of the roles that are here and not everywhere."""
        placement = self.exchange.placement
        return {
            role.name: Judges(
                group=role.engine.model.groups.everyone,
                is_writer=self.context.rank == role.layout.ranks[0],
            )
            for role in (self.actor, self.critic)
            if role is not None
            and role.engine is not None
            and not placement.is_everywhere(role.name)
        }

    def _build_step(self) -> TrainingStep:
        parts: dict[str, Any] = {
            "config": self.config,
            "ledger": self.ledger,
            "loader": self.loader,
            "maker": self.maker,
            "sampling": self.sampling,
            "weights": self.weights,
            "ppo": self.ppo,
            "exchange": self.exchange,
            "kl": self.kl,
            "bad_steps": self.bad_steps,
            "throughput": self.throughput,
            "syncs_after": self._syncs_after,
            "updates_begin": self.stop.updates_begin,
            "job_group": self.job,
            "device": self.context.device,
        }
        if self.config.pipeline.depth == 0:
            return TrainingStep(**parts)
        in_flight = InFlight(restore=self.maker.restored, prompts=self.prompts.rows)
        return PipelinedStep(**parts, in_flight=in_flight)

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
        roles = self.exchange.placement.ranks.keys() & {"actor", "critic", "ref"}
        if any(offloaded_kinds(self.config, role=role) for role in roles):
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
            roles={"actor": self.actor} | ({"critic": self.critic} if self.critic else {}),
            ref=self.ref if ref_is_lost else None,
            tensors=(
                {"in_flight": self.step.in_flight} if isinstance(self.step, PipelinedStep) else {}
            ),
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
            own = None
            with self.actor_weights.on_device(version=version):
                if self.actor.engine is not None:
                    plan = [list(range(len(batch)))]
                    found = self.ppo.log_probs(self.actor.engine, batch=batch, plan=plan)
                    own = {"old_logprobs": found}
            sizes = {"old_logprobs": batch.num_response_tokens}
            return self.exchange.tensors("actor", own, sizes=sizes)["old_logprobs"]

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
        warmup = None
        if self.actor.engine is not None:
            warmup = SupervisedWarmup(
                self.actor.engine,
                demonstrations=data.demonstrations,
                config=config,
                micro_batch_tokens=self.config.ppo.micro_batch_tokens,
                seed=self.config.run.seed,
            )
        self.say(f"supervised warm-up: {config.steps} steps on {len(data.demonstrations)} examples")
        with self.ledger.phase("warmup"):
            for step in range(1, config.steps + 1):
                own = warmup.step() if warmup is not None else None
                loss = self.exchange.figures("actor", own)
                self.ledger.go_on()
                checks.check_finite({"loss": loss}, names=("loss",))
                self._stop_early()
                if step == 1 or step % max(config.steps // 5, 1) == 0:
                    self.say(f"  warm-up step {step}: loss {loss:.4f}")
        if self.actor.engine is not None:
            self.actor.engine.reset_optimizer()

    def _evaluate(self, step: int) -> None:
        """Evaluate the engines' present weights; keep the actor if it is the best so far."""
        if self.evaluator is None:
            return
        report = self.evaluator.run(step=step)
        if self.is_main:
            append_evaluation(self.folder, report=report)
        self.say(f"evaluation after step {step}: mean reward {report.reward_mean:.4f}")
        if self.evaluations.add(report) and step > 0 and self.config.evaluation.keep_best:
            self.actor_weights.export(self.folder / "checkpoints" / "best", version=step)

    def _write_ledger(self) -> StepLedger:
        """The records of all ranks since the last step."""
        ledger = merge_ledgers(gather_lists([self.ledger.finish_step()], group=self.job))
        if self.is_main:
            append_ledger(self.folder, ledger=ledger)
        return ledger

    def _finish_step(self, step: int, metrics: dict[str, float]) -> None:
        """Write and show the step."""
        ledger = self._write_ledger()
        metrics |= ledger.metrics() | idle_metrics(ledger) | self.checkpointer.take_metrics()
        metrics |= self.throughput.metrics(metrics)
        self.output.step(step, metrics=metrics)
        self.monitor.after_step(step)

    def _finish(self) -> None:
        self.checkpointer.finish()
        self.output.before_and_after(self.evaluations)
        if self.config.export.final:
            self.actor_weights.export(self.folder / "hf", version=self.config.run.steps)
        self.output.close(self.evaluations)
