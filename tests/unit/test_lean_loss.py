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
from rlhf_megatron.models import fused, vocab_parallel
from rlhf_megatron.models.rotary import Rotary
from rlhf_megatron.models.vocab_parallel import CHUNK_BYTES, VocabShard, token_log_probs
from rlhf_megatron.observability.memory import reset_peak

ROOT = Path(__file__).parents[2]
TOKENS, ROWS, VOCABULARY, HIDDEN = 37, 96, 91, 24


class OneRank:
    def size(self) -> int:
        return 1


def chunked(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_bytes: int, kept_logits_bytes: int = 0
):
    found = token_log_probs(
        hidden,
        weight=weight,
        targets=targets,
        shard=VocabShard(start=0, rows=ROWS, vocab_size=VOCABULARY, group=OneRank()),
        temperature=0.8,
        chunk_bytes=chunk_bytes,
        kept_logits_bytes=kept_logits_bytes,
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
@pytest.mark.parametrize("kept_logits_bytes", [0, 4 * TOKENS * ROWS], ids=["again", "kept"])
def test_chunks_give_log_probs_entropy_loss_and_gradients_of_the_whole(
    chunk_bytes, kept_logits_bytes
):
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    results = []
    for compute in (whole, lambda *given: chunked(*given, chunk_bytes, kept_logits_bytes)):
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


def test_logits_are_kept_only_where_all_of_them_may_be(monkeypatch):
    computed = []
    plain = vocab_parallel._logits

    def counted(hidden: Tensor, **options):
        computed.append(len(hidden))
        return plain(hidden, **options)

    monkeypatch.setattr(vocab_parallel, "_logits", counted)
    whole_bytes = 4 * TOKENS * ROWS
    for allowed, times in ((whole_bytes, 1), (whole_bytes - 1, 2)):
        computed.clear()
        hidden = torch.ones(TOKENS, HIDDEN, requires_grad=True)
        found = chunked(
            hidden, torch.ones(ROWS, HIDDEN), torch.zeros(TOKENS, dtype=torch.int64), 1 << 27,
            allowed,
        )  # fmt: skip
        found[0].sum().backward()
        assert len(computed) == times


def test_what_is_compiled_on_a_gpu_is_what_is_done_in_place_elsewhere():
    """fused.py's functions, run as they stand, against the in-place ones and autograd."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, ROWS, generator=generator, dtype=torch.float64)
    targets = torch.randint(-1, ROWS, (TOKENS,), generator=generator)
    weights = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    here = targets >= 0
    given = logits.clone().requires_grad_()
    every = (given / 0.8).log_softmax(-1)
    logprobs = every.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    entropy = -(every.exp() * every).sum(-1)
    # Of a target on another rank, only the normaliser is known here.
    normaliser = (given / 0.8).logsumexp(-1)
    logprobs = torch.where(here, logprobs, -normaliser)
    (weights[0] * logprobs + weights[1] * entropy).sum().backward()

    maxima = fused.row_maxima(logits, 0.8)
    sums = fused.row_sums(logits, maxima, 0.8)
    torch.testing.assert_close(maxima + sums[0].log(), normaliser.detach())
    torch.testing.assert_close(sums[0].log() - sums[1] / sums[0], entropy.detach())
    found = fused.grad_logits(
        logits, targets, normaliser.detach(), entropy.detach(), weights[0], weights[1], 0.8
    )
    torch.testing.assert_close(found, given.grad)


def test_a_turn_is_undone_by_the_opposite_turn_and_its_gradient_is_that():
    frequencies = torch.tensor([1.0, 0.1, 0.01])
    rotary = Rotary(frequencies)
    angles = rotary.at(torch.tensor([0, 1, 2, 0, 1]), dtype=torch.float64)
    x = torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    turned = angles.apply(x)
    # The oracle: complex numbers.
    first = torch.polar(torch.ones(5, 3), torch.tensor([0, 1, 2, 0, 1.0]).outer(frequencies))
    expected = torch.complex(x[..., :3], x[..., 3:]) * first[:, None].to(torch.complex128)
    torch.testing.assert_close(turned[..., :3], expected.real, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(turned[..., 3:], expected.imag, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(fused.rotate_back(turned, angles.cosines, angles.sines), x)
    assert torch.autograd.gradcheck(angles.apply, x.requires_grad_())


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
