"""Activations recomputed in the backward pass: the same gradients, in less memory kept."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pool import run_ranks
from roles import CPU, Shape, micro_batches, new_factory
from test_models import as_result, ragged_batch, split
from torch import Tensor

from rlhf_megatron.distributed.groups import build_role_groups
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.models.build import LM_HEAD, VALUE_HEAD, build_model
from rlhf_megatron.models.config import OptimizerConfig, RecomputeConfig

WAYS = {
    "none": RecomputeConfig(),
    "selective": RecomputeConfig(granularity="selective"),
    "full": RecomputeConfig(granularity="full"),
    "full_1": RecomputeConfig(granularity="full", num_layers=1),
}
SHAPES = [
    Shape(),
    Shape(tp=2, sp=True),
    Shape(pp=2),
    Shape(pp=2, vpp=2),
    Shape(tp=2, pp=2, sp=True),
]


@dataclass
class Found:
    gradients: dict[str, Tensor]
    saved_bytes: int
    """Of the tensors that autograd kept for the backward pass."""


def gradients_of(rank: int, directory: Path, shape: Shape, head: str, way: str) -> Found:
    """Of packed, ragged micro-batches, through the pipeline."""
    groups = build_role_groups(f"{way}-{shape}", layout=shape.layout, factory=new_factory())
    model = build_model(
        read_architecture(directory),
        head=head,
        groups=groups,
        precision="fp32",
        layer_spec_name="local",
        recompute=WAYS[way],
        device=CPU,
        seed=1,
    )
    if head == VALUE_HEAD:  # it begins at zero, and would pass no gradient on
        for name, parameter in model.parameters().items():
            if name.endswith("output_layer.weight"):
                torch.nn.init.constant_(parameter, 0.1)
    engine = ModelEngine(model, device=CPU, optimizer_config=OptimizerConfig())
    batch = ragged_batch()
    micros = micro_batches(engine, batch, samples_by_replica=split(1), fields=("w",))

    def loss(output, micro):
        if head == VALUE_HEAD:
            return as_result((output[:, 0][micro.state_indices] * micro.fields["w"]).sum())
        found = engine.log_probs(output, micro_batch=micro, temperature=1.0)
        return as_result((found.logprobs * micro.fields["w"]).sum())

    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.train_step(micros, loss=loss, learning_rate=0.0, takes=lambda _: False)
    for parameter in model.parameters().values():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    gradients = {n: p.main_grad.clone() for n, p in model.parameters().items()}
    return Found(gradients, sum(kept.values()))


CASES = [(LM_HEAD, shape) for shape in SHAPES] + [(VALUE_HEAD, SHAPES[-1])]


def all_ways(rank: int, directory: Path, shape: Shape, head: str) -> dict[str, Found]:
    return {way: gradients_of(rank, directory, shape, head, way) for way in WAYS}


@pytest.mark.parametrize(("head", "shape"), CASES, ids=lambda case: str(case))
def test_gradients_are_the_same_however_much_is_recomputed(models, head, shape):
    for found in run_ranks(shape.world_size, all_ways, models / "llama", shape, head):
        expected = found["none"].gradients
        assert any(bool(gradient.any()) for gradient in expected.values())
        for way in ("selective", "full", "full_1"):
            assert found[way].gradients.keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(
                    found[way].gradients[name],
                    gradient,
                    atol=1e-6,
                    rtol=1e-6,
                    msg=f"{way} {name}",
                )


def test_full_keeps_less_and_one_layer_of_it_something_between(models):
    (found,) = run_ranks(1, all_ways, models / "llama", Shape(), LM_HEAD)
    kept = {way: one.saved_bytes for way, one in found.items()}
    assert kept["full"] < kept["full_1"] < kept["none"]
