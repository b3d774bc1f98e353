"""The planner's activations against tensors counted in real training and inference passes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from live_memory import LiveTensors, SavedTensors
from pool import run_ranks
from roles import CPU, Shape, micro_batches, new_factory
from small_models import make_batch

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.distributed.groups import build_role_groups
from rlhf_megatron.engine.model_engine import LossResult, ModelEngine
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.layout.tensors import Head
from rlhf_megatron.memory.switches import RecomputeChoice
from rlhf_megatron.memory.training import (
    BatchSizes,
    StageModel,
    inference_pass,
    saved_activations,
    training_pass,
)
from rlhf_megatron.models.build import build_model
from rlhf_megatron.models.config import OptimizerConfig, RecomputeConfig

NUM_MICRO_BATCHES = 3
PROMPT, RESPONSE, SAMPLES = 8, 56, 8
SIZES = BatchSizes(
    micro_tokens=SAMPLES * (PROMPT + RESPONSE),
    micro_response_tokens=SAMPLES * RESPONSE,
    mini_micro_batches=NUM_MICRO_BATCHES,
    mini_tokens=0,  # the micro-batches are made before the counting begins
    step_tokens=0,
)
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}


ONE = Shape()


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: Shape = ONE
    head: Head = "lm"
    precision: str = "fp32"
    recompute: str = "none"
    num_layers: int = 0
    changes: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        changed = "".join(f"-{key}{value}" for key, value in self.changes if len(str(value)) < 5)
        recompute = f"{self.recompute}{self.num_layers or ''}"
        return f"{self.shape}-{self.head}-{self.precision}-{recompute}{changed}"


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Bytes: found, then predicted."""

    saved: tuple[int, int]
    training: tuple[int, int]
    inference: tuple[int, int]


def counted(rank: int, folder: Path, case: Case) -> Counted:
    arch = read_architecture(folder)
    layout = case.shape.layout
    groups = build_role_groups("role", layout=layout, factory=new_factory())
    assert groups is not None
    built = build_model(
        arch,
        head=case.head,
        groups=groups,
        precision=case.precision,
        layer_spec_name="local",
        recompute=RecomputeConfig(granularity=case.recompute, num_layers=case.num_layers),
        device=CPU,
        seed=1,
    )
    engine = ModelEngine(built, device=CPU, optimizer_config=OptimizerConfig())
    count = NUM_MICRO_BATCHES * SAMPLES
    batch = make_batch((PROMPT,) * count, response_lengths=(RESPONSE,) * count)
    batch.tokens = batch.tokens % arch.vocab_size
    packs = [list(range(i, i + SAMPLES)) for i in range(0, count, SAMPLES)]
    micros = micro_batches(engine, batch, samples_by_replica=[packs] * layout.data_parallel_size)

    # A micro-batch's tensors share a buffer, which is there whether autograd saves its ids or not.
    saved = SavedTensors([*built.parameters().values(), *(micro.tokens for micro in micros)])
    with saved.counting():
        train(engine, micros)
    training = LiveTensors()
    with training:
        train(engine, micros)
    inference = LiveTensors()
    with inference:
        infer(engine, micros, batch=batch)
    model = StageModel(
        arch=arch,
        layout=layout,
        stage=groups.coordinates.pp,
        head=case.head,
        itemsize=built.config.params_dtype.itemsize,
        kernels="composite",
        recompute=RecomputeChoice(granularity=case.recompute, num_layers=case.num_layers),
    )
    planned_saved = saved_activations(model, sizes=SIZES)
    if groups.is_last_stage:
        layer = model.layer(SIZES.micro_tokens)
        planned_saved += model.head_memory(
            layer, response_tokens=SIZES.micro_response_tokens
        ).loss_saved
    return Counted(
        saved=(saved.peak_before_backward, planned_saved),
        training=(training.peak, training_pass(model, sizes=SIZES).total),
        inference=(inference.peak, inference_pass(model, sizes=SIZES).total),
    )


def train(engine: ModelEngine, micros: list) -> None:
    def loss(output: torch.Tensor, micro: Any) -> LossResult:
        if engine.model.head == "value":
            values = output[:, 0][micro.state_indices]
            return LossResult(loss_sum=values.square().sum(), count=torch.tensor(1))
        found = engine.log_probs(output, micro_batch=micro, temperature=1.0)
        loss_sum = -found.logprobs.sum()
        if engine.model.head == "joint":
            loss_sum = loss_sum + micro.values[micro.state_indices].square().sum()
        return LossResult(loss_sum=loss_sum, count=torch.tensor(1))

    engine.train_step(micros, loss=loss, learning_rate=1e-4)


def infer(engine: ModelEngine, micros: list, *, batch: RaggedBatch) -> None:
    def outputs(output: torch.Tensor, micro: Any) -> dict:
        if engine.model.head == "value":
            return {"x": (output[:, 0][micro.state_indices], micro.response_rows)}
        found = engine.log_probs(output, micro_batch=micro, temperature=1.0)
        return {"x": (found.logprobs, micro.response_rows)}

    engine.infer(micros, outputs=outputs, sizes={"x": batch.num_response_tokens})


WIDE = (("vocab_size", 2048),)
CASES = [
    Case(),
    Case(recompute="selective"),
    Case(recompute="full"),
    Case(recompute="full", num_layers=1),
    Case(head="value"),
    Case(head="joint"),
    Case(head="joint", changes=WIDE, recompute="full", precision="bf16"),
    Case(head="joint", shape=Shape(tp=2, sp=True)),
    Case(precision="bf16"),
    Case(precision="bf16", recompute="full", head="value"),
    Case(changes=WIDE),
    Case(changes=WIDE, recompute="full", precision="bf16"),
    Case(changes=tuple(QWEN3.items())),
    Case(shape=Shape(tp=2)),
    Case(shape=Shape(tp=2, sp=True)),
    Case(shape=Shape(tp=2, sp=True), recompute="full", precision="bf16"),
    Case(shape=Shape(tp=2, sp=True), head="value"),
    Case(shape=Shape(pp=2)),
    Case(shape=Shape(pp=2), recompute="full", precision="bf16"),
    Case(shape=Shape(pp=4), changes=(("num_hidden_layers", 8),)),
    Case(shape=Shape(pp=2, vpp=2)),
    Case(shape=Shape(tp=2, pp=2, sp=True)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_activations_are_as_planned(case, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL | dict(case.changes)))
    for rank, found in enumerate(run_ranks(case.shape.world_size, counted, tmp_path, case)):
        for what in ("saved", "training", "inference"):
            measured, planned = getattr(found, what)
            print(
                f"{case} rank {rank} {what}: {measured} counted, {planned} planned, "
                f"{planned / measured - 1:+.1%}"
            )
            assert abs(planned - measured) <= 0.05 * measured, (case, rank, what)
