"""Gradients of the policy and the value loss against finite differences, in float64."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pool import run_ranks
from roles import CPU, Shape, build_role, new_factory
from small_models import make_batch
from torch import Tensor

from rlhf_megatron.algorithms.config import KlConfig, PpoConfig
from rlhf_megatron.algorithms.losses import policy_loss, value_loss
from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.engine.microbatch import make_micro_batch
from rlhf_megatron.engine.model_engine import ModelEngine
from rlhf_megatron.models.build import LM_HEAD, VALUE_HEAD

STEP = 1e-6
CONFIG = PpoConfig(
    entropy_coefficient=0.05, dual_clip=2.0, kl=KlConfig(place="loss", estimator="k3")
)


def with_fields(batch: RaggedBatch) -> RaggedBatch:
    """Old figures near and far from the present ones, so that every branch of the losses is met."""
    generator = torch.Generator().manual_seed(3)
    count = batch.num_response_tokens
    for name in ("noise", "ref_noise", "advantages", "returns"):
        batch.response[name] = torch.randn(count, generator=generator, dtype=torch.float64)
    batch.response["loss_mask"] = torch.ones(count)
    batch.response["loss_mask"][2] = 0.0
    return batch


def loss_function(engine: ModelEngine, head: str) -> Callable[[], Tensor]:
    """The loss of the batch as a function of the weights."""
    batch = with_fields(make_batch((3, 1, 4), response_lengths=(4, 1, 3)))
    micro = make_micro_batch(
        batch, samples=[0, 1, 2], fields=sorted(batch.response), pad_to_multiple=1, device=CPU
    )
    fields, old = micro.fields, {}
    common = {
        "loss_mask": fields["loss_mask"],
        "response_lengths": micro.response_lengths,
        "config": CONFIG,
        "max_response_tokens": 4,
    }

    def loss() -> Tensor:
        with engine.model.groups.active():
            output = engine.model.chunks[0](
                micro.tokens,
                micro.packed.position_ids[None],
                None,
                packed_seq_params=micro.packed,
            )[0]
        if head == VALUE_HEAD:
            values = output[:, 0][micro.state_indices]
            old.setdefault("values", values.detach() + 0.3 * fields["noise"])
            found = value_loss(
                values, old_values=old["values"], returns=fields["returns"], **common
            )
        else:
            policy = engine.log_probs(output, micro_batch=micro, temperature=0.7)
            old.setdefault("logprobs", policy.logprobs.detach() + 0.3 * fields["noise"])
            found = policy_loss(
                policy.logprobs,
                old_logprobs=old["logprobs"],
                ref_logprobs=old["logprobs"] + 0.1 * fields["ref_noise"],
                advantages=fields["advantages"],
                entropy=policy.entropy,
                kl_coefficient=0.2,
                **common,
            )
        assert found.loss_sum.dtype == torch.float64
        return found.loss_sum / found.count

    return loss


def worst_difference(rank: int, directory: Path, head: str) -> dict[str, float]:
    """Of each parameter: largest |gradient - finite difference| over a sample of its entries, as
    a share of the parameter's largest gradient."""
    engine = build_role(
        directory, shape=Shape(), factory=new_factory(), head=head, dtype=torch.float64
    )
    parameters = {n: p.requires_grad_() for n, p in engine.model.parameters().items()}
    loss = loss_function(engine, head)
    loss().backward()
    generator, worst = torch.Generator().manual_seed(0), {}
    for name, parameter in parameters.items():
        grad, flat = parameter.grad.flatten(), parameter.data.view(-1)
        assert grad.dtype == torch.float64
        largest = int(grad.abs().argmax())
        entries = {largest, *torch.randint(len(grad), (2,), generator=generator).tolist()}
        differences = []
        for entry in entries:
            sides = []
            for sign in (1, -1):
                flat[entry] += sign * STEP
                with torch.no_grad():
                    sides.append(float(loss()))
                flat[entry] -= sign * STEP
            differences.append(abs((sides[0] - sides[1]) / (2 * STEP) - float(grad[entry])))
        worst[name] = max(differences) / float(grad[largest].abs())
    return worst


@pytest.mark.parametrize(
    ("kind", "head"), [("qwen2", LM_HEAD), ("tied", LM_HEAD), ("critic", VALUE_HEAD)]
)
def test_gradients_are_finite_differences(models, kind, head):
    (worst,) = run_ranks(1, worst_difference, models / kind, head)
    print(f"\n{kind}: worst relative difference {max(worst.values()):.2e} of {len(worst)}")
    assert len(worst) > 20
    assert all(difference < 1e-6 for difference in worst.values()), worst
