"""Every family in Megatron-Core layouts against transformers, and its training under TP and VPP.

benchmarks/family_logits.py goes through all layouts and prints the errors.
"""

from pathlib import Path

import pytest
import torch
from family_models import (
    FAMILIES,
    KINDS,
    REFERENCE,
    YARN,
    make_family_model,
    reference_log_probs,
    save_family_models,
    valid_shapes,
    worst_errors,
)
from pool import run_ranks
from roles import Shape, build_role, micro_batches, new_factory
from small_models import make_batch, response_log_probs, response_targets
from torch import Tensor

from rlhf_megatron.engine.microbatch import MicroBatch
from rlhf_megatron.engine.model_engine import LossResult
from rlhf_megatron.layout.architecture import read_architecture
from rlhf_megatron.layout.megatron import megatron_layouts
from rlhf_megatron.layout.tensors import logical_tensors
from rlhf_megatron.models.config import OptimizerConfig

BOUND = 2e-4
SHAPES = [
    Shape(),
    Shape(tp=3),
    Shape(tp=4, sp=True),
    Shape(tp=2, pp=2, vpp=2),
    Shape(pp=3, vpp=2),
]


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("families")
    run_ranks(1, save_family_models, folder, KINDS)
    return folder


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_log_probs_are_those_of_transformers(families, shape):
    """All families in one set of processes; a kind that cannot be cut this way is left out."""
    plain = Shape(tp=shape.tp, pp=shape.pp, vpp=shape.vpp)
    directories = {
        kind: families / kind
        for kind in KINDS
        if plain in valid_shapes(read_architecture(families / kind))
    }
    assert len(directories) >= len(FAMILIES)
    for errors in run_ranks(shape.world_size, worst_errors, directories, shape):
        assert errors.keys() == directories.keys()
        assert max(errors.values()) <= BOUND, errors


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama_llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("llama_linear", {"rope_parameters": {"rope_type": "default"}}),
        ("llama_yarn_tied", {"rope_parameters": YARN | {"attention_factor": 1.0, "beta_fast": 4}}),
        ("llama_yarn_tied", {"rope_parameters": YARN | {"beta_fast": 64.0, "beta_slow": 32.0}}),
        ("qwen2", {"rope_parameters": {"rope_type": "default"}}),
        ("mistral_window", {"sliding_window": 6}),
        ("qwen3", {"rms_norm_eps": 0.1}),
    ],
)
def test_every_field_matters_here(families, kind, change):
    """Otherwise one that is ignored would go unseen above."""
    found = torch.load(families / kind / REFERENCE)
    changed = reference_log_probs(make_family_model(kind, **change))
    assert (found - changed).abs().max() > 100 * BOUND
    assert 0.3 < -(found.exp() * found).sum(dim=1).mean() < 4.8  # neither peaked nor flat


def gradients(rank: int, directory: Path, shape: Shape) -> dict[str, Tensor]:
    """The mean gradient of each logical tensor that this rank holds, in its place; NaN elsewhere.

    Three micro-batches: an odd number under virtual stages is filled up.
    """
    engine = build_role(
        directory,
        shape=shape,
        factory=new_factory(),
        optimizer=OptimizerConfig(learning_rate=0.0, clip_grad=0.0),
    )

    def loss(hidden: Tensor, micro: MicroBatch) -> LossResult:
        found = engine.log_probs(hidden, micro_batch=micro, temperature=1.0)
        loss_sum = (found.logprobs * micro.fields["w"]).sum()
        return LossResult(loss_sum=loss_sum, count=torch.tensor(micro.targets.numel()))

    batch = gradient_batch()
    micros = micro_batches(engine, batch, samples_by_replica=[[[0], [1, 2], [3]]], fields=("w",))
    engine.train_step(micros, loss=loss, learning_rate=0.0)
    held = {name: p.main_grad for name, p in engine.model.parameters().items()}
    found = {
        t.name: torch.full(t.shape, torch.nan)
        for t in logical_tensors(engine.model.arch, head="lm")
    }
    for placement in engine.model.rank_layout(rank):
        part = held[placement.parameter][placement.region(placement.box)]
        found[placement.tensor][placement.box.slices()] = part
    return found


def gradient_batch():
    return make_batch((2, 3, 1, 4), response_lengths=(7, 2, 9, 1), seed=9)


def true_gradients(rank: int, kind: str) -> dict[str, Tensor]:
    model, batch = make_family_model(kind), gradient_batch()
    log_probs = response_log_probs(model, batch=batch, temperature=1.0)
    chosen = log_probs.gather(1, response_targets(batch)[:, None])[:, 0]
    ((chosen * batch.response["w"]).sum() / batch.num_response_tokens).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("qwen3", Shape(tp=2)),
        ("qwen3_tied", Shape(tp=4, sp=True)),
        ("qwen3_odd", Shape(tp=3)),
        ("qwen3_tied", Shape(tp=2, pp=2, vpp=2, sp=True)),
        ("mistral_window", Shape(pp=3, vpp=2)),
        ("qwen2_yarn_tied", Shape(pp=2, vpp=2)),
    ],
    ids=str,
)
def test_every_gradient_is_that_of_transformers(families, kind, shape):
    """Each rank's query and key norms see its own heads only: without a sum over the TP ranks they
    would be wrong, in silence."""
    (expected,) = run_ranks(1, true_gradients, kind)
    copies: dict[str, Tensor] = {}
    for rank_gradients in run_ranks(shape.world_size, gradients, families / kind, shape):
        for name, found in rank_gradients.items():
            held = ~found.isnan()
            copies[name] = copies.get(name, 0) + held.int()
            difference = (found - expected[name])[held].abs()
            assert (difference <= 1e-4 * expected[name].abs().max()).all(), name
    assert copies.keys() == expected.keys()
    assert all((count >= 1).all() for count in copies.values())
    norms = [count for name, count in copies.items() if "norm" in name]
    assert all((count == shape.tp).all() for count in norms)


def test_all_layouts_of_the_matrix_are_tried(families):
    """The awkward numbers fit as many layouts as they are meant to."""
    twelve, nine = (read_architecture(families / kind) for kind in ("qwen3", "qwen3_odd"))
    assert len(valid_shapes(twelve)) == 16
    assert [(s.tp, s.pp, s.vpp) for s in valid_shapes(nine)] == [(1, 1, 1), (1, 3, 1), (3, 1, 1)]
    for shape in valid_shapes(twelve):
        layouts = megatron_layouts(twelve, parallel=shape.layout, head="lm", fused_norms=False)
        assert len(layouts) == shape.world_size
