"""Megatron-Core models in every layout against transformers."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from pool import run_ranks
from roles import Shape, build_role, micro_batches, new_factory
from small_models import (
    make_batch,
    make_model,
    response_log_probs,
    response_targets,
    token_values,
)
from torch import Tensor

from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.engine.microbatch import MicroBatch
from rlhf_megatron.engine.model_engine import LossResult, ModelEngine
from rlhf_megatron.models.build import LM_HEAD, VALUE_HEAD, RoleModel
from rlhf_megatron.models.config import OptimizerConfig

TEMPERATURE = 0.7
ENTROPY_WEIGHT = 0.3
BOUND = 2e-5

ALL_SHAPES = [
    Shape(),
    Shape(tp=2),
    Shape(tp=2, sp=True),
    Shape(pp=2),
    Shape(tp=2, pp=2),
    Shape(pp=2, vpp=2),
    Shape(dp=2),
    Shape(tp=2, pp=2, dp=2, sp=True),
]
LAST_SHAPES = [Shape(tp=2, pp=2), Shape(tp=2, pp=2, dp=2, sp=True)]
LM_CASES = [("llama", shape) for shape in ALL_SHAPES]
LM_CASES += [
    (kind, shape)
    for kind in ("one_kv_head", "tied", "qwen2")
    for shape in (Shape(tp=2, pp=2), Shape(tp=4, sp=True))
]
LM_CASES += [("tied", Shape(tp=2, pp=2, vpp=2, dp=2, sp=True))]
LM_CASES += [("llama", Shape(tp=2, pp=2, dp=2, order=("pp", "tp", "dp")))]


def ragged_batch() -> RaggedBatch:
    """Seven samples, among them responses of one token and of none."""
    return make_batch((3, 5, 2, 4, 7, 3, 1), response_lengths=(4, 1, 6, 0, 3, 4, 9))


def split(replicas: int) -> list[list[list[int]]]:
    """Two micro-batches of each replica; the last of two replicas has none in its second."""
    return [[[0, 3, 4], [1, 2, 5, 6]]] if replicas == 1 else [[[6, 1], [2, 0]], [[3, 4, 5], []]]


@dataclass
class Outcome:
    """What a role says of the batch, and its first updates."""

    inferred: dict[str, Tensor]
    losses: list[float]
    grad_norms: list[float]


def log_prob_outputs(engine: ModelEngine):
    def outputs(hidden: Tensor, micro: MicroBatch) -> dict[str, tuple[Tensor, Tensor]]:
        found = engine.log_probs(hidden, micro_batch=micro, temperature=TEMPERATURE)
        return {
            "logprobs": (found.logprobs, micro.response_rows),
            "entropy": (found.entropy, micro.response_rows),
        }

    return outputs


def value_outputs(output: Tensor, micro: MicroBatch) -> dict[str, tuple[Tensor, Tensor]]:
    values = output[:, 0]
    return {
        "values": (values[micro.state_indices], micro.response_rows),
        "last": (values[micro.last_indices], micro.sample_rows),
    }


def as_result(loss: Tensor) -> LossResult:
    count = torch.tensor(1)
    sums = torch.stack([loss.detach().double(), count.double()])
    return LossResult(loss_sum=loss, count=count, sums={"loss": sums})


def run_role(engine: ModelEngine, *, batch: RaggedBatch, num_updates: int) -> Outcome:
    """Inference, then updates on sum(w * output) (+ entropy), a mean over micro-batches."""
    parts = split(engine.model.groups.layout.data_parallel_size)
    micros = micro_batches(engine, batch, samples_by_replica=parts, fields=("w",))
    is_lm = engine.model.head == LM_HEAD
    tokens, samples = batch.num_response_tokens, len(batch)
    inferred = engine.infer(
        micros,
        outputs=log_prob_outputs(engine) if is_lm else value_outputs,
        sizes={"logprobs": tokens, "entropy": tokens}
        if is_lm
        else {"values": tokens, "last": samples},
    )

    def loss(output: Tensor, micro: MicroBatch) -> LossResult:
        if not is_lm:
            return as_result((output[:, 0][micro.state_indices] * micro.fields["w"]).sum())
        found = engine.log_probs(output, micro_batch=micro, temperature=TEMPERATURE)
        weighed = (found.logprobs * micro.fields["w"]).sum()
        return as_result(weighed + ENTROPY_WEIGHT * found.entropy.sum())

    steps = [engine.train_step(micros, loss=loss, learning_rate=1e-3) for _ in range(num_updates)]
    return Outcome(inferred, [s.metrics["loss"] for s in steps], [s.grad_norm for s in steps])


def lm_case(rank: int, directory: Path, shape: Shape) -> Outcome:
    optimizer = OptimizerConfig(learning_rate=1e-3, clip_grad=0.0)
    engine = build_role(directory, shape=shape, factory=new_factory(), optimizer=optimizer)
    return run_role(engine, batch=ragged_batch(), num_updates=2)


def lm_oracle(rank: int, kind: str) -> Outcome:
    """transformers and torch's AdamW, one sample at a time; sums, not means."""
    model, batch = make_model(kind), ragged_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses, norms, inferred = [], [], {}
    for _ in range(2):
        every = response_log_probs(model, batch=batch, temperature=TEMPERATURE)
        chosen = every.gather(1, response_targets(batch)[:, None])[:, 0]
        entropy = -(every.exp() * every).sum(-1)
        inferred = inferred or {"logprobs": chosen.detach(), "entropy": entropy.detach()}
        loss = (chosen * batch.response["w"]).sum() + ENTROPY_WEIGHT * entropy.sum()
        optimizer.zero_grad()
        loss.backward()
        losses.append(float(loss))
        norms.append(gradient_norm(model))
        optimizer.step()
    return Outcome(inferred, losses, norms)


def gradient_norm(model) -> float:
    return float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())


@pytest.fixture(scope="module")
def lm_oracles() -> dict[str, Outcome]:
    return {kind: run_ranks(1, lm_oracle, kind)[0] for kind, _ in dict(LM_CASES).items()}


@pytest.mark.parametrize(
    ("kind", "shape"), LM_CASES, ids=[f"{kind}-{shape}" for kind, shape in LM_CASES]
)
def test_log_probs_entropy_and_updates_are_those_of_transformers(models, lm_oracles, kind, shape):
    outcomes = run_ranks(shape.world_size, lm_case, models / kind, shape)
    expected = lm_oracles[kind]
    # Each replica and micro-batch counts 1: losses and gradients are means of as many parts.
    parts = 2 * shape.dp
    for outcome in outcomes:
        for name in ("logprobs", "entropy"):
            assert (outcome.inferred[name] - expected.inferred[name]).abs().max() <= BOUND
        assert [x * parts for x in outcome.losses] == pytest.approx(expected.losses, rel=1e-4)
        assert [x * parts for x in outcome.grad_norms] == pytest.approx(
            expected.grad_norms, rel=1e-4
        )


def bf16_case(rank: int, directory: Path, shape: Shape) -> Outcome:
    engine = build_role(
        directory,
        shape=shape,
        factory=new_factory(),
        optimizer=OptimizerConfig(learning_rate=1e-3, clip_grad=0.0),
        precision="bf16",
    )
    assert {p.dtype for p in engine.model.parameters().values()} == {torch.bfloat16}
    return run_role(engine, batch=ragged_batch(), num_updates=2)


@pytest.mark.parametrize("shape", [Shape(tp=2, pp=2, sp=True), Shape(tp=2, dp=2)], ids=str)
def test_bf16_comes_near(models, lm_oracles, shape):
    parts, expected = 2 * shape.dp, lm_oracles["llama"]
    for outcome in run_ranks(shape.world_size, bf16_case, models / "llama", shape):
        for name in ("logprobs", "entropy"):
            assert outcome.inferred[name].dtype == torch.float32
            difference = (outcome.inferred[name] - expected.inferred[name]).abs()
            assert 1e-5 < difference.mean() < 0.03 and difference.max() < 0.15
        assert [x * parts for x in outcome.losses] == pytest.approx(expected.losses, abs=0.5)
        norms = [x * parts for x in outcome.grad_norms]
        assert norms == pytest.approx(expected.grad_norms, rel=0.03)


def fresh_optimizers(rank: int, directory: Path, shape: Shape) -> list[list[float]]:
    """Norms and losses of two updates: after a reset, and of a new role with the same weights."""
    factory, batch = new_factory(), ragged_batch()
    options = {"shape": shape, "optimizer": OptimizerConfig(learning_rate=1e-3)}
    old = build_role(directory, factory=factory, **options)
    run_role(old, batch=batch, num_updates=2)
    new = build_role(directory, factory=factory, load=False, **options)
    for name, parameter in new.model.parameters().items():
        parameter.data.copy_(old.model.parameters()[name])
    old.reset_optimizer()
    new.weights_changed()
    outcomes = [run_role(engine, batch=batch, num_updates=3) for engine in (old, new)]
    return [outcome.losses + outcome.grad_norms for outcome in outcomes]


def test_a_reset_optimizer_has_forgotten_the_past(models):
    shape = Shape(tp=2, dp=2)
    for reset, new in run_ranks(4, fresh_optimizers, models / "llama", shape):
        assert reset == new


def value_case(rank: int, directory: Path, shape: Shape) -> Outcome:
    optimizer = OptimizerConfig(learning_rate=1e-3, clip_grad=0.0)
    engine = build_role(
        directory, shape=shape, factory=new_factory(), head=VALUE_HEAD, optimizer=optimizer
    )
    return run_role(engine, batch=ragged_batch(), num_updates=2)


def value_oracle(rank: int) -> Outcome:
    model, batch = make_model("critic"), ragged_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses, norms, inferred = [], [], {}
    for _ in range(2):
        values, last = token_values(model, batch=batch)
        inferred = inferred or {"values": values.detach(), "last": last.detach()}
        loss = (values * batch.response["w"]).sum()
        optimizer.zero_grad()
        loss.backward()
        losses.append(float(loss))
        norms.append(gradient_norm(model))
        optimizer.step()
    return Outcome(inferred, losses, norms)


@pytest.fixture(scope="module")
def critic_oracle() -> Outcome:
    return run_ranks(1, value_oracle)[0]


@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
def test_values_and_updates_are_those_of_hidden_states_times_the_head(models, critic_oracle, shape):
    parts = 2 * shape.dp
    assert critic_oracle.inferred["values"].abs().mean() > 0.1  # the head is not zero
    for outcome in run_ranks(shape.world_size, value_case, models / "critic", shape):
        for name in ("values", "last"):
            difference = outcome.inferred[name] - critic_oracle.inferred[name]
            assert difference.abs().max() <= BOUND
        assert [x * parts for x in outcome.losses] == pytest.approx(critic_oracle.losses, rel=1e-4)
        assert [x * parts for x in outcome.grad_norms] == pytest.approx(
            critic_oracle.grad_norms, rel=1e-4
        )


def untouched_critic(rank: int, directory: Path) -> Tensor:
    engine = build_role(directory, shape=Shape(tp=2), factory=new_factory(), head=VALUE_HEAD)
    batch = ragged_batch()
    micros = micro_batches(engine, batch, samples_by_replica=split(1))
    return engine.infer(
        micros, outputs=value_outputs, sizes={"values": batch.num_response_tokens, "last": 7}
    )["values"]


def test_a_critic_from_a_language_model_answers_zero(models):
    for values in run_ranks(2, untouched_critic, models / "llama"):
        assert torch.equal(values, torch.zeros(27))


def mixed_roles(rank: int, models: Path, kinds: list[tuple[str, str, Shape]]) -> list[Outcome]:
    """Roles in one process, their work interleaved: each is built, then each infers and trains."""
    factory, batch = new_factory(), ragged_batch()
    optimizer = OptimizerConfig(learning_rate=1e-3)
    engines = [
        build_role(models / kind, shape=shape, factory=factory, head=head, optimizer=optimizer)
        for kind, head, shape in kinds
    ]
    outcomes = []
    for _ in range(2):
        outcomes = [run_role(engine, batch=batch, num_updates=2) for engine in engines]
    return outcomes


@pytest.mark.parametrize(
    ("actor", "critic"),
    [(Shape(tp=2), Shape(dp=2)), (Shape(tp=4, sp=True), Shape(tp=2, pp=2))],
    ids=["tp2_with_tp1", "tp4sp_with_tp2pp2"],
)
def test_roles_of_different_layouts_in_one_process_are_as_alone(models, actor, critic):
    """One KV head is below every TP size here: attention then reads the global parallel_state."""
    kinds = [("one_kv_head", LM_HEAD, actor), ("one_kv_head_critic", VALUE_HEAD, critic)]
    together = run_ranks(actor.world_size, mixed_roles, models, kinds)[0]
    for kind, outcome in zip(kinds, together, strict=True):
        alone = run_ranks(actor.world_size, mixed_roles, models, [kind])[0][0]
        assert outcome.losses == alone.losses
        assert outcome.grad_norms == alone.grad_norms
        for name, values in alone.inferred.items():
            assert torch.equal(outcome.inferred[name], values)


def parameter_attributes(rank: int, models: Path, shape: Shape) -> list[dict[str, tuple]]:
    def found(model: RoleModel) -> dict[str, tuple]:
        return {
            name: (
                getattr(p, "tensor_model_parallel", False),
                getattr(p, "partition_dim", None),
                getattr(p, "sequence_parallel", False),
            )
            for name, p in model.parameters().items()
        }

    factory = new_factory()
    return [
        found(build_role(models / "qwen2", shape=shape, factory=factory, head=head).model)
        for head in (LM_HEAD, VALUE_HEAD)
    ]


CUT_DIMENSION = {
    "word_embeddings.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc2.weight": 1,
}


@pytest.mark.parametrize("shape", [Shape(tp=2), Shape(tp=2, pp=2, sp=True)], ids=str)
def test_parameters_say_how_they_are_cut(models, shape):
    """Gradient norms count a parameter once or once per TP rank by these attributes, which
    Megatron-Core 0.16.1 loses with perform_initialization=False."""
    for roles in run_ranks(shape.world_size, parameter_attributes, models, shape):
        for is_critic, attributes in enumerate(roles):
            assert len(attributes) > 10
            for name, (is_cut, dimension, is_sequence_parallel) in attributes.items():
                cut = {d for suffix, d in CUT_DIMENSION.items() if name.endswith(suffix)}
                if name == "output_layer.weight" and not is_critic:
                    cut = {0}
                assert is_cut == bool(cut), name
                assert not cut or {dimension} == cut, name
                assert bool(is_sequence_parallel) == (shape.sp and not cut), name
            assert any(name.endswith("layernorm.weight") for name in attributes)
