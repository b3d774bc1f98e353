"""The plan against tensors counted in real roles: weights, gradients, optimizer, transfer buffers.

The quickstart's model. The same for one of 300M parameters (12 GB of memory, some minutes):
MEMORY_PLAN_MODEL=300m pytest -s tests/distributed/test_memory_plan.py
"""

import gc
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_memory import storage_bytes
from pool import run_ranks
from roles import CPU, Shape, micro_batches, new_factory
from small_models import make_batch

from rlhf_megatron.config import Config, load_config
from rlhf_megatron.distributed.groups import GroupFactory, build_role_groups
from rlhf_megatron.engine.model_engine import LossResult, ModelEngine
from rlhf_megatron.layout.architecture import ModelArchitecture, read_architecture
from rlhf_megatron.layout.vllm import vllm_layouts
from rlhf_megatron.memory.parameters import engine_shapes
from rlhf_megatron.memory.plan import Machine, RoleModels, plan_memory
from rlhf_megatron.memory.rank import RankMemory
from rlhf_megatron.models.build import build_model
from rlhf_megatron.models.config import OptimizerConfig
from rlhf_megatron.placed_role import role_layouts
from rlhf_megatron.reshard.execute import Resharder
from rlhf_megatron.reshard.plan import BUCKETS_IN_FLIGHT, make_plan

ROOT = Path(__file__).parents[2]
QUICKSTART: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
LARGE = QUICKSTART | {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
IS_LARGE = os.environ.get("MEMORY_PLAN_MODEL") == "300m"
BUCKET_MB = 16.0 if IS_LARGE else 0.1
ENGINE_SIZE = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: Shape
    precision: str = "fp32"
    tied: bool = False
    shared: bool = False
    """The critic is a head on the actor."""

    def __str__(self) -> str:
        ends = f"{'-tied' if self.tied else ''}{'-shared' if self.shared else ''}"
        return f"{self.shape}-{self.precision}{ends}"


CASES = [
    Case(shape=Shape()),
    Case(shape=Shape(tp=2, sp=True), precision="bf16"),
    Case(shape=Shape(pp=2)),
    Case(shape=Shape(tp=2, pp=2, sp=True), precision="bf16"),
]
SMALL_CASES = [
    Case(shape=Shape(dp=3), precision="bf16"),
    Case(shape=Shape(pp=2, dp=2), precision="bf16", tied=True),
    Case(shape=Shape(pp=2, vpp=2)),
    Case(shape=Shape(tp=2, pp=2, sp=True), precision="bf16", shared=True),
]


def quickstart_config(case: Case) -> Config:
    """The shipped file, with the case's layout for all roles."""
    shape, overrides = case.shape, [f"reshard.bucket_mb={BUCKET_MB}"]
    for role in ("actor", "critic", "ref"):
        at = f"{role}.parallel"
        overrides += [
            f"{role}.precision={case.precision}",
            f"{at}.tensor_model_parallel_size={shape.tp}",
            f"{at}.pipeline_model_parallel_size={shape.pp}",
            f"{at}.virtual_pipeline_model_parallel_size={shape.vpp}",
            f"{at}.sequence_parallel={str(shape.sp).lower()}",
        ]
    size = ENGINE_SIZE if shape.world_size % ENGINE_SIZE == 0 else 1
    engines = [range(first, first + size) for first in range(0, shape.world_size, size)]
    overrides += [
        f"rollout.tensor_parallel_size={size}",
        f"rollout.engines={';'.join(','.join(map(str, engine)) for engine in engines)}",
    ]
    files = [ROOT / "configs" / "quickstart_cpu.yaml"]
    files += [ROOT / "configs" / "profiles" / "shared_backbone.yaml"] if case.shared else []
    return load_config([str(file) for file in files], overrides=overrides)


def planned(rank: int, *, case: Case, arch: ModelArchitecture) -> RankMemory:
    plan = plan_memory(
        quickstart_config(case),
        models=RoleModels(actor=arch, critic=None if case.shared else arch, ref=arch),
        machine=Machine(world_size=case.shape.world_size, gpu_memory_bytes=None),
    )
    return next(group for group in plan.ranks if rank in group.ranks)


def counted(rank: int, folder: Path, case: Case) -> dict[str, tuple[int, int]]:
    """Bytes of each kind on this rank: counted, then planned."""
    arch, factory = read_architecture(folder), new_factory()
    plan = planned(rank, case=case, arch=arch)
    found: dict[str, tuple[int, int]] = {}
    for role in plan.roles:
        name = role.setting.name
        engine = build(name, arch=arch, case=case, factory=factory, is_trained=name != "ref")
        sizes = counted_role(engine)
        found |= {
            f"{name} {part}": (sizes[part], planned_size)
            for part, planned_size in role.resident.items()
        }
        if name == "actor":
            found |= counted_sync(rank, engine=engine, case=case, plan=plan)
        del engine
        gc.collect()
    return found


def build(
    name: str, *, arch: ModelArchitecture, case: Case, factory: GroupFactory, is_trained: bool
) -> ModelEngine:
    groups = build_role_groups(name, layout=case.shape.layout, factory=factory)
    assert groups is not None
    model = build_model(
        arch,
        head={"critic": "value", "actor": "joint" if case.shared else "lm"}.get(name, "lm"),
        groups=groups,
        precision=case.precision,
        layer_spec_name="local",
        device=CPU,
        seed=1,
    )
    optimizer = OptimizerConfig() if is_trained else None
    engine = ModelEngine(model, device=CPU, optimizer_config=optimizer)
    if is_trained:
        one_step(engine)
    return engine


def one_step(engine: ModelEngine) -> None:
    """After it the optimizer has all its state."""
    batch = make_batch((3, 4, 2), response_lengths=(6, 5, 4))
    batch.tokens = batch.tokens % 99
    replicas = engine.model.groups.layout.data_parallel_size
    micros = micro_batches(engine, batch, samples_by_replica=[[[0, 1]], [[1, 2]], [[0]]][:replicas])

    def loss(output: torch.Tensor, micro: Any) -> LossResult:
        return LossResult(loss_sum=output.square().sum(), count=torch.tensor(11))

    engine.train_step(micros, loss=loss, learning_rate=1e-4)


def counted_role(engine: ModelEngine) -> dict[str, int]:
    parameters = list(engine.model.parameters().values())
    if engine.optimizer is None:
        return {"weights": storage_bytes(parameters), "gradients": 0, "optimizer": 0}
    inner = [
        part.optimizer
        for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    ]
    state = [
        value
        for optimizer in inner
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    ]
    masters = [
        p for optimizer in inner for group in optimizer.param_groups for p in group["params"]
    ]
    own = {p.untyped_storage().data_ptr() for p in parameters}
    masters = [p for p in masters if p.untyped_storage().data_ptr() not in own]
    return {
        "weights": storage_bytes(parameters),
        "gradients": storage_bytes(p.main_grad for p in parameters),
        "optimizer": storage_bytes([*state, *masters]),
    }


def counted_sync(
    rank: int, *, engine: ModelEngine, case: Case, plan: RankMemory
) -> dict[str, tuple[int, int]]:
    """A sync into parameters of vLLM's shapes: their bytes, and the transfer buffers'."""
    config, model = quickstart_config(case), engine.model
    size, world = config.rollout.tensor_parallel_size, case.shape.world_size
    target = vllm_layouts(
        model.arch, engines=[range(first, first + size) for first in range(0, world, size)]
    )
    dtype = model.config.params_dtype
    weights = {
        name: torch.empty(shape, dtype=dtype)
        for name, shape in engine_shapes(model.arch, tensor_parallel_size=size).items()
    }
    resharder = Resharder(
        make_plan(
            role_layouts(model),
            target,
            itemsize_bytes=dtype.itemsize,
            bucket_bytes=int(config.reshard.bucket_mb * 1e6) // BUCKETS_IN_FLIGHT,
            ranks=[rank],
        ),
        rank=rank,
        group=dist.group.WORLD,
        source=model.parameters(),
        target=weights,
        dtype=dtype,
        device=CPU,
    )
    buffers = resharder.run().buffer_bytes
    (phase,) = (phase for phase in plan.phases if phase.phase == "reshard")
    return {
        "engine weights": (
            storage_bytes(weights.values()),
            phase.of(owner="engine", kind="weights"),
        ),
        "transfer buffers": (buffers, phase.of(owner="job", kind="buffers")),
    }


@pytest.mark.parametrize("case", CASES if IS_LARGE else CASES + SMALL_CASES, ids=str)
def test_counted_tensors_are_as_planned(case, tmp_path):
    model = (LARGE if IS_LARGE else QUICKSTART) | {"tie_word_embeddings": case.tied}
    (tmp_path / "config.json").write_text(json.dumps(model))
    ranks = run_ranks(case.shape.world_size, counted, tmp_path, case, timeout_seconds=600)
    for rank, found in enumerate(ranks):
        assert len(found) == (8 if case.shared else 11)
        for what, (measured, plan) in found.items():
            if IS_LARGE:
                print(f"{case} rank {rank} {what}: {measured} counted, {plan} planned")
            assert abs(plan - measured) <= 0.01 * measured, (case, rank, what, measured, plan)
