"""Micro-batches and losses on a CUDA device: the CPU's, and made without waiting for the device."""

from collections.abc import Iterator
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from rlhf_megatron.algorithms.config import PpoConfig
from rlhf_megatron.algorithms.losses import LossSum, policy_loss, value_loss
from rlhf_megatron.batch import RaggedBatch
from rlhf_megatron.engine.microbatch import MicroBatch, equal_micro_batches, make_micro_batch

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FIELDS = ("old_logprobs", "advantages", "loss_mask", "values", "returns")


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises."""
    torch.zeros(1, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def batch_of(num_samples: int) -> RaggedBatch:
    generator = torch.Generator().manual_seed(3)
    prompts, responses = (
        torch.randint(1, 200, (num_samples,), generator=generator) for _ in range(2)
    )
    responses[1] = 0
    count = int(responses.sum())
    batch = RaggedBatch(
        tokens=torch.randint(0, 1000, (int(prompts.sum()) + count,), generator=generator),
        prompt_lengths=prompts,
        response_lengths=responses,
    )
    batch.response = {name: torch.randn(count, generator=generator) for name in FIELDS}
    batch.response["loss_mask"] = (batch.response["loss_mask"] > -1).float()
    return batch


def micros_on(device: torch.device, batch: RaggedBatch) -> list[MicroBatch]:
    made = [
        make_micro_batch(batch, samples=samples, fields=FIELDS, pad_to_multiple=8, device=device)
        for samples in ([3, 0, 1], [2, 4], [])
    ]
    return made + equal_micro_batches(made, number_multiple=2)


def tensors_of(micro: MicroBatch) -> dict[str, Tensor]:
    found = {f.name: getattr(micro, f.name) for f in fields(micro)}
    packed, response = found.pop("packed"), found.pop("fields")
    found |= {"cu_seqlens": packed.cu_seqlens_q, "positions": packed.position_ids, **response}
    return {name: value for name, value in found.items() if value is not None}


def losses(micro: MicroBatch, *, aggregation: str) -> list[LossSum]:
    given, config = micro.fields, PpoConfig(aggregation=aggregation)
    common = {
        "loss_mask": given["loss_mask"],
        "response_lengths": micro.response_lengths,
        "config": config,
        "max_response_tokens": 200,
    }
    return [
        policy_loss(
            given["values"] / 10,
            old_logprobs=given["old_logprobs"] / 10,
            advantages=given["advantages"],
            entropy=given["returns"],
            ref_logprobs=None,
            kl_coefficient=0.0,
            **common,
        ),
        value_loss(
            given["values"], old_values=given["values"] / 2, returns=given["returns"], **common
        ),
    ]


def test_micro_batches_are_made_without_waiting(no_waiting: None) -> None:
    batch = batch_of(5)
    found = micros_on(CUDA, batch)
    torch.cuda.set_sync_debug_mode("default")
    for ours, expected in zip(found, micros_on(CPU, batch), strict=True):
        wanted = tensors_of(expected)
        for name, value in tensors_of(ours).items():
            assert torch.equal(value.cpu(), wanted[name]), name
            assert value.is_cuda == (name not in ("response_rows", "sample_rows")), name


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum_norm"])
def test_losses_do_not_wait(no_waiting: None, aggregation: str) -> None:
    batch = batch_of(5)
    found = [losses(micro, aggregation=aggregation) for micro in micros_on(CUDA, batch)]
    torch.cuda.set_sync_debug_mode("default")
    for micro, ours in zip(micros_on(CPU, batch), found, strict=True):
        for one, wanted in zip(ours, losses(micro, aggregation=aggregation), strict=True):
            torch.testing.assert_close(one.loss_sum.cpu(), wanted.loss_sum)
            assert int(one.count) == int(wanted.count)
            assert one.metrics.means() == pytest.approx(wanted.metrics.means(), rel=1e-4, abs=1e-6)
