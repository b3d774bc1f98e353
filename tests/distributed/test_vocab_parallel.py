"""Chunked log-probs and entropy over a cut vocabulary against torch's autograd on whole logits."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from pool import run_ranks
from torch import Tensor

from rlhf_megatron.models.vocab_parallel import VocabShard, token_log_probs

NUM_TOKENS, HIDDEN, ROWS = 11, 16, 128
TEMPERATURE = 0.7


@dataclass
class Found:
    logprobs: Tensor
    entropy: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def inputs(vocab_size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Padding rows hold large weights: unmasked, they would take all the probability."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    weight = normal(ROWS, HIDDEN) * 0.5
    weight[vocab_size:] = 50.0
    found = {
        "hidden": normal(NUM_TOKENS, HIDDEN),
        "weight": weight,
        "logprob_factors": normal(NUM_TOKENS),
        "entropy_factors": normal(NUM_TOKENS),
    }
    targets = torch.randint(0, vocab_size, (NUM_TOKENS,), generator=generator)
    targets[0], targets[1] = 0, vocab_size - 1
    return {name: x.to(dtype) for name, x in found.items()} | {"targets": targets}


def loss_of(logprobs: Tensor, entropy: Tensor, given: dict[str, Tensor]) -> Tensor:
    return (logprobs * given["logprob_factors"] + entropy * given["entropy_factors"]).sum()


def on_ranks(rank: int, vocab_size: int, dtype: torch.dtype, chunk_tokens: int) -> Found:
    given, size = inputs(vocab_size, dtype), dist.get_world_size()
    rows = ROWS // size
    hidden = given["hidden"].requires_grad_()
    weight = given["weight"][rank * rows : (rank + 1) * rows].clone().requires_grad_()
    shard = VocabShard(start=rank * rows, rows=rows, vocab_size=vocab_size, group=dist.group.WORLD)
    found = token_log_probs(
        hidden,
        weight=weight,
        targets=given["targets"],
        shard=shard,
        temperature=TEMPERATURE,
        chunk_bytes=4 * rows * chunk_tokens,
    )
    loss_of(found.logprobs, found.entropy, given).backward()
    dist.all_reduce(hidden.grad)  # as models/heads.py does
    weights = [torch.empty_like(weight) for _ in range(size)]
    dist.all_gather(weights, weight.grad)
    return Found(found.logprobs.detach(), found.entropy.detach(), hidden.grad, torch.cat(weights))


def whole(vocab_size: int) -> Found:
    """By autograd in float64, over the real vocabulary alone."""
    given = inputs(vocab_size, torch.float64)
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    every = (hidden @ weight[:vocab_size].t() / TEMPERATURE).log_softmax(dim=-1)
    logprobs = every.gather(1, given["targets"][:, None])[:, 0]
    entropy = -(every.exp() * every).sum(dim=-1)
    loss_of(logprobs, entropy, given).backward()
    return Found(logprobs.detach(), entropy.detach(), hidden.grad, weight.grad)


@pytest.mark.parametrize("vocab_size", [ROWS, 101, 50], ids=["full", "padded", "padding_shard"])
@pytest.mark.parametrize(
    ("world_size", "chunk_tokens", "dtype", "bound"),
    [
        (1, 1024, torch.float64, 1e-12),
        (1, 3, torch.float64, 1e-12),
        (2, 1024, torch.float64, 1e-12),
        (2, 3, torch.float64, 1e-12),
        (2, 3, torch.float32, 2e-5),
    ],
)
def test_values_and_gradients(vocab_size, world_size, chunk_tokens, dtype, bound):
    expected = whole(vocab_size)
    for found in run_ranks(world_size, on_ranks, vocab_size, dtype, chunk_tokens):
        assert found.logprobs.dtype == dtype
        for name, value in vars(expected).items():
            assert (getattr(found, name) - value).abs().max() <= bound, name
        assert torch.equal(found.grad_weight[vocab_size:], torch.zeros(ROWS - vocab_size, HIDDEN))


def no_tokens(rank: int) -> Tensor:
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    weight = torch.ones(ROWS // 2, HIDDEN, requires_grad=True)
    shard = VocabShard(start=rank * 64, rows=64, vocab_size=101, group=dist.group.WORLD)
    found = token_log_probs(
        hidden,
        weight=weight,
        targets=torch.zeros(0, dtype=torch.int64),
        shard=shard,
        temperature=1.0,
    )
    (found.logprobs.sum() + found.entropy.sum()).backward()
    return weight.grad


def test_no_tokens_give_no_gradient():
    for grad in run_ranks(2, no_tokens):
        assert torch.equal(grad, torch.zeros(64, HIDDEN))
