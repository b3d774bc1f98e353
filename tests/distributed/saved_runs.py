"""Roles on the ranks of a test that are saved and resumed as the trainer does it."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from roles import CPU, Shape, build_role, new_factory
from updates import (
    MAX_RESPONSE_TOKENS,
    SEED,
    TEMPERATURE,
    Trace,
    one_round,
    optimizer_config,
    ppo_config,
)

from rlhf_megatron.algorithms.kl import KlController, kl_controller
from rlhf_megatron.checkpoint.sharded_files import open_sharded
from rlhf_megatron.checkpointing import Checkpointer
from rlhf_megatron.config import Config
from rlhf_megatron.distributed.config import ParallelConfig
from rlhf_megatron.distributed.start import DistributedContext
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.models.build import VALUE_HEAD
from rlhf_megatron.observability.ledger import PhaseLedger
from rlhf_megatron.placed_role import placed
from rlhf_megatron.ppo import PpoStep
from rlhf_megatron.resume import find_resume_point
from rlhf_megatron.run_state import RunState
from rlhf_megatron.stopping import StopAgreement


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a test's run lives and what it is made from."""

    models: Path
    rollout: Path
    output: Path
    actor: str = "llama"
    critic: str = "critic"
    precision: str = "fp32"
    asynchronous: bool = True


@dataclass
class SavedRun:
    """The roles of a run on this rank, without rollouts."""

    ppo: PpoStep
    controller: KlController
    checkpointer: Checkpointer
    config: Config
    context: DistributedContext
    place: Place
    step: int = 0

    def round(self) -> Trace:
        """The next step on the recorded rollout."""
        self.step += 1
        trace = Trace()
        one_round(
            self.ppo,
            rollout=self.place.rollout,
            step=self.step,
            controller=self.controller,
            trace=trace,
        )
        return trace

    def save(self) -> None:
        self.checkpointer._step = self.step  # what after_step notes
        self.checkpointer.begins()
        self.checkpointer.save()
        self.checkpointer.finish()

    def resume(self) -> None:
        """Raises UserError, as the program does."""
        point = find_resume_point(self.config, context=self.context)
        assert point is not None
        self.checkpointer.resume(point)
        self.step = point.step


def build_run(rank: int, place: Place, shape: Shape) -> SavedRun:
    """Actor, critic and reference at `shape`, with their starting weights."""
    factory = new_factory()
    config = _config(place, shape)
    options = {"shape": shape, "factory": factory, "precision": place.precision}
    actor = build_role(place.models / place.actor, optimizer=optimizer_config(), **options)
    critic = build_role(
        place.models / place.critic, head=VALUE_HEAD, optimizer=optimizer_config(), **options
    )
    ref = build_role(place.models / "reference", **options)
    controller = kl_controller(config.ppo.kl)
    context = DistributedContext(
        rank=rank,
        world_size=shape.world_size,
        local_rank=rank,
        local_world_size=shape.world_size,
        device=CPU,
        backend="gloo",
        timeout_seconds=60.0,
        job_group=dist.group.WORLD,
    )
    ppo = PpoStep(
        config.ppo,
        actor=actor,
        critic=critic,
        ref=ref,
        temperature=TEMPERATURE,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        seed=SEED,
    )
    checkpointer = Checkpointer(
        config,
        run=RunState(
            roles={"actor": placed(actor), "critic": placed(critic)},
            ref=None,
            parts={"kl": controller},
        ),
        stop=StopAgreement(signals=None, time_limit=None, group=dist.group.WORLD, device=CPU),
        context=context,
        ledger=PhaseLedger(rank=rank, device=CPU),
        say=lambda _: None,
    )
    return SavedRun(ppo, controller, checkpointer, config, context, place)


def _config(place: Place, shape: Shape) -> Config:
    config = Config(ppo=ppo_config())
    config.run.output_dir = str(place.output)
    config.actor.model = str(place.models / place.actor)
    config.critic.model = str(place.models / place.critic)
    config.ref.model = str(place.models / "reference")
    config.rollout.max_prompt_tokens = config.rollout.max_response_tokens = 16
    config.checkpoint.asynchronous = place.asynchronous
    for role in (config.actor, config.critic, config.ref):
        role.precision = place.precision
        role.parallel = ParallelConfig(
            tensor_model_parallel_size=shape.tp,
            pipeline_model_parallel_size=shape.pp,
            virtual_pipeline_model_parallel_size=shape.vpp,
            sequence_parallel=shape.sp,
        )
    return config


def stored_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by folder and key, whole, without vocabulary padding."""
    found = {}
    for role in ("actor", "critic"):
        for part in ("weights", "optimizer"):
            for key, tensor in open_sharded(checkpoint / role / part).items():
                whole = torch.full(tensor.shape, float("nan"), dtype=tensor.dtype)
                for piece in tensor.pieces:
                    whole[piece.box.slices()] = piece.read()
                found[f"{role}/{part}/{key}"] = whole
    return found


def engines(run: SavedRun) -> dict[str, ModelEngine]:
    return {"actor": run.ppo.actor, "critic": run.ppo.critic}
