"""Log-probs, entropy and loss from hidden states in chunks: as the whole computation, in less."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlhf_megatron.algorithms.config import PpoConfig
from rlhf_megatron.algorithms.losses import policy_loss
from rlhf_megatron.models.vocab_parallel import CHUNK_BYTES, VocabShard, token_log_probs
from rlhf_megatron.observability.memory import reset_peak

ROOT = Path(__file__).parents[2]
TOKENS, ROWS, VOCABULARY, HIDDEN = 37, 96, 91, 24


class OneRank:
    def size(self) -> int:
        return 1


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_bytes: int):
    found = token_log_probs(
        hidden,
        weight=weight,
        targets=targets,
        shard=VocabShard(start=0, rows=ROWS, vocab_size=VOCABULARY, group=OneRank()),
        temperature=0.8,
        chunk_bytes=chunk_bytes,
    )
    return found.logprobs, found.entropy


def whole(hidden: Tensor, weight: Tensor, targets: Tensor):
    every = (hidden @ weight[:VOCABULARY].t() / 0.8).log_softmax(-1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)


def loss_of(logprobs: Tensor, entropy: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(2, TOKENS, generator=generator)
    return policy_loss(
        logprobs,
        old_logprobs=logprobs.detach() + 0.1 * noise[0],
        advantages=noise[1],
        loss_mask=(noise[0] < 1.0).float(),
        response_lengths=torch.tensor([20, 0, 17]),
        entropy=entropy,
        ref_logprobs=None,
        config=PpoConfig(entropy_coefficient=0.01),
        kl_coefficient=0.0,
        max_response_tokens=20,
    ).loss_sum


@pytest.mark.parametrize(
    "chunk_bytes",
    [1, 4 * ROWS * 5, 4 * TOKENS * 7, 1 << 27],
    ids=["one_by_one", "five_tokens", "seven_rows", "all"],
)
def test_chunks_give_log_probs_entropy_loss_and_gradients_of_the_whole(chunk_bytes):
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    results = []
    for compute in (whole, lambda *given: chunked(*given, chunk_bytes)):
        generator.manual_seed(2)
        hidden = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
        weight = (0.1 * torch.randn(ROWS, HIDDEN, generator=generator)).requires_grad_()
        logprobs, entropy = compute(hidden, weight, targets)
        loss = loss_of(logprobs, entropy)
        # Of the mean, as an optimizer step takes it.
        gradients = torch.autograd.grad(loss / TOKENS, (hidden, weight))
        results.append((logprobs.detach(), entropy.detach(), loss.detach(), *gradients))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_bf16_gradients_are_as_near_to_float32_as_whole_bf16_logits_give():
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    weight = (0.1 * torch.randn(ROWS, HIDDEN, generator=generator)).bfloat16()

    def gradients(dtype: torch.dtype, compute) -> list[Tensor]:
        given = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        logprobs, entropy = compute(*given, targets)
        (logprobs.sum() + entropy.sum()).backward()
        return [x.grad.float() for x in given]

    exact = gradients(torch.float32, whole)
    for found, truth in zip(
        gradients(torch.bfloat16, lambda *g: chunked(*g, 4 * TOKENS * 7)), exact, strict=True
    ):
        assert (found - truth).norm() <= 0.01 * truth.norm()


def test_the_whole_array_never_exists():
    """The benchmark's default, 8192 tokens x 131072 words with chunks of 128 MiB, at half of
    the tokens and words and narrow hidden states, to be quick."""
    if not reset_peak(torch.device("cpu")):
        pytest.skip("the kernel keeps no peak that can be reset")
    command = [sys.executable, "benchmarks/lean_loss.py", "--device=cpu", "--hidden=16"]
    command += ["--tokens=4096", "--vocabulary=65536", f"--chunk-bytes={CHUNK_BYTES // 4}"]
    text = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert text.returncode == 0, text.stderr
    found = json.loads(text.stdout)
    assert found["whole_bytes"] == 4 * 4096 * 65536
    assert 0.01 < found["share"] <= 1 / 8
