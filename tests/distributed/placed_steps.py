"""Whole training steps on recorded rollouts, with roles on any ranks: for test_placement.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from roles import CPU, Shape, build_role
from updates import MAX_RESPONSE_TOKENS, RATE, SEED, TEMPERATURE, optimizer_config, ppo_config

from rlhf_megatron.algorithms.kl import kl_controller
from rlhf_megatron.bad_steps import BadSteps
from rlhf_megatron.batch import RaggedBatch, load_batch
from rlhf_megatron.config import Config
from rlhf_megatron.data.prompts import PromptRow
from rlhf_megatron.distributed.groups import GroupFactory
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.experience import ExperienceMaker
from rlhf_megatron.faults_config import FaultsConfig
from rlhf_megatron.models.build import LM_HEAD, VALUE_HEAD
from rlhf_megatron.observability.ledger import PhaseLedger, StepLedger
from rlhf_megatron.ppo import PpoStep
from rlhf_megatron.rewards.contract import ScoringInput
from rlhf_megatron.role_exchange import RoleExchange, build_exchange_groups
from rlhf_megatron.role_ranks import RolePlacement
from rlhf_megatron.rollout.contract import SamplingParameters
from rlhf_megatron.step import TrainingStep
from rlhf_megatron.weight_sync import NO_SYNC

NUM_STEPS = 5
HEADS = {"actor": LM_HEAD, "critic": VALUE_HEAD, "ref": LM_HEAD}
MODELS = {"actor": "llama", "critic": "critic", "ref": "reference"}


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Layouts and ranks of a run's roles."""

    name: str
    world_size: int
    actor: Shape
    critic: Shape
    ref: Shape
    rollout: tuple[int, ...] = (0, 1)
    reward: tuple[int, ...] = ()
    """Empty: all ranks."""

    @property
    def shapes(self) -> dict[str, Shape]:
        return {"actor": self.actor, "critic": self.critic, "ref": self.ref}

    @property
    def placement(self) -> RolePlacement:
        ranks = {role: shape.layout.ranks for role, shape in self.shapes.items()}
        ranks["reward"] = self.reward or tuple(range(self.world_size))
        ranks["rollout"] = self.rollout
        return RolePlacement(world_size=self.world_size, ranks=ranks)


@dataclass
class PlacedTrace:
    """What one rank has seen."""

    steps: list[dict[str, float]] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    """The critic's, of each step's response tokens."""
    pieces: dict[str, list[tuple[str, Any, torch.Tensor]]] = field(default_factory=dict)
    """Role -> tensor, where in it, and what this rank holds of it in the end."""
    ledgers: list[StepLedger] = field(default_factory=list)


class Recorded:
    """A rollout engine that answers from a recorded batch."""

    def __init__(self, batch: RaggedBatch, *, ranks: tuple[int, ...]) -> None:
        self.batch, self.ranks = batch, ranks

    def generate(self, prompts: Sequence[Any], *, step: int, **_: Any) -> RaggedBatch:
        found = self.batch.select([prompt.prompt_id for prompt in prompts])
        found.sample["weight_versions"] = torch.full((len(found),), step - 2)  # no parity
        return found

    def sleep(self) -> None:
        pass


def run_steps(rank: int, models: Path, rollout: Path, case: Placed) -> PlacedTrace:
    """NUM_STEPS whole steps."""
    placement, factory = case.placement, GroupFactory(timeout_seconds=110)
    engines = {
        role: _engine(models, role=role, shape=shape, factory=factory)
        for role, shape in case.shapes.items()
    }
    ledger = PhaseLedger(rank=rank, device=CPU, apart=placement.phases_apart)
    groups = build_exchange_groups(placement, factory=factory, rank=rank)
    exchange = RoleExchange(placement, groups=groups, rank=rank, ledger=ledger)
    step = _step(case, rollout=rollout, engines=engines, exchange=exchange, ledger=ledger)
    trace = PlacedTrace()
    for number in range(1, NUM_STEPS + 1):
        outcome = step.run(number)
        trace.steps.append(outcome.metrics)
        trace.values.append(outcome.experience.batch.response["values"])
        trace.ledgers.append(ledger.finish_step())
    for role, engine in engines.items():
        if engine is not None:
            trace.pieces[role] = _pieces(engine, rank=rank)
    return trace


def _engine(models: Path, *, role: str, shape: Shape, factory: Any) -> ModelEngine | None:
    if dist.get_rank() not in shape.layout.ranks:
        return None
    return build_role(
        models / MODELS[role],
        shape=shape,
        factory=factory,
        head=HEADS[role],
        optimizer=optimizer_config() if role != "ref" else None,
    )


def _step(
    case: Placed,
    *,
    rollout: Path,
    engines: dict[str, ModelEngine | None],
    exchange: RoleExchange,
    ledger: PhaseLedger,
) -> TrainingStep:
    rank = dist.get_rank()
    batch = load_batch(rollout)
    rewards = batch.sample.pop("rewards").tolist()
    rows = [
        PromptRow(prompt_id=i, text=str(i), token_ids=(1,), messages=None, fields={})
        for i in range(len(batch))
    ]
    config = Config(ppo=ppo_config())
    for optimizer in (config.actor.optimizer, config.critic.optimizer):
        optimizer.learning_rate = RATE
    config.actor.precision = "fp32"
    config.parity.action = "warn"
    config.ref.model = "another one"  # so that nobody expects it to be the actor
    world: Any = dist.group.WORLD
    bad_steps = BadSteps(
        FaultsConfig(), output_dir=rollout.parent, rank=rank, group=world, say=lambda _: None
    )

    def score(samples: Sequence[ScoringInput]) -> list[float]:
        return [rewards[sample.prompt_id] for sample in samples]

    maker = ExperienceMaker(
        engine=Recorded(batch, ranks=(rank,)) if rank in case.rollout else None,  # type: ignore[arg-type]
        engines=[(r,) for r in case.rollout],
        tokenizer=SimpleNamespace(decode=str),  # type: ignore[arg-type]
        scorer=score if rank in exchange.placement.ranks["reward"] else None,
        overlaps=False,
        on_error="stop",
        error_value=0.0,
        exchange=exchange,
        rank=rank,
        job_group=world,
        device=CPU,
        ledger=ledger,
    )
    parts: dict[str, Any] = {
        "loader": SimpleNamespace(next_step=lambda: rows),
        "weights": SimpleNamespace(sleep=lambda: None, sync=lambda version: NO_SYNC),
        "throughput": SimpleNamespace(work=lambda *_, **__: {}),
    }
    return TrainingStep(
        config=config,
        ledger=ledger,
        maker=maker,
        sampling=SamplingParameters(
            temperature=TEMPERATURE,
            max_response_tokens=MAX_RESPONSE_TOKENS,
            responses_per_prompt=1,
            stop_token_ids=(),
        ),
        ppo=PpoStep(
            config.ppo,
            **engines,  # type: ignore[arg-type]
            temperature=TEMPERATURE,
            max_response_tokens=MAX_RESPONSE_TOKENS,
            seed=SEED,
            guard=bad_steps,
        ),
        exchange=exchange,
        kl=kl_controller(config.ppo.kl),
        bad_steps=bad_steps,
        syncs_after=lambda _: True,
        updates_begin=lambda: None,
        job_group=world,
        device=CPU,
        **parts,
    )


def _pieces(engine: ModelEngine, *, rank: int) -> list[tuple[str, Any, torch.Tensor]]:
    parameters = engine.model.parameters()
    return [
        (
            place.tensor,
            place.box.slices(),
            parameters[place.parameter][place.region(place.box)].detach().clone(),
        )
        for place in engine.model.rank_layout(rank)
    ]
