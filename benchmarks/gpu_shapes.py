"""The models and the lengths that the GPU benchmarks share.

Models are config.json files alone: weights are random and never saved. Lengths follow one seeded
spread, so that all benchmarks, and all versions of the code, meet the same work.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.batch import RaggedBatch, ragged_ranges
from rlhf_megatron.layout.architecture import ModelArchitecture, read_architecture

LENGTHS_SEED = 20
PROMPT_MEDIAN, PROMPT_SIGMA = 0.36, 0.6
"""Of the lognormal, the median as a share of the longest prompt: of 1024, a mean near 430."""
RESPONSE_MEDIAN, RESPONSE_SIGMA = 0.41, 0.75
"""The same of responses: a mean near 500, and about one in eight cut at the longest."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and how much work is usual with it."""

    name: str
    config: dict[str, Any]
    """Of config.json."""
    max_prompt_tokens: int
    max_response_tokens: int
    micro_batch_tokens: int

    @property
    def max_model_len(self) -> int:
        return self.max_prompt_tokens + self.max_response_tokens

    def write(self, folder: str | Path) -> ModelArchitecture:
        """Write config.json into `folder`, and read it as the trainer does."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        return read_architecture(folder)


def _llama(**numbers: Any) -> dict[str, Any]:
    common = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "attention_bias": False,
        "mlp_bias": False,
    }
    return common | numbers


_LLAMA_3_2 = {
    "vocab_size": 128256,
    "intermediate_size": 8192,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="llama-3.2-1b",
            config=_llama(
                num_hidden_layers=16,
                hidden_size=2048,
                num_attention_heads=32,
                head_dim=64,
                **_LLAMA_3_2,
            ),
            max_prompt_tokens=1024,
            max_response_tokens=1024,
            micro_batch_tokens=16384,
        ),
        Shape(
            name="llama-3.2-3b",
            config=_llama(
                num_hidden_layers=28,
                hidden_size=3072,
                num_attention_heads=24,
                head_dim=128,
                **_LLAMA_3_2,
            ),
            max_prompt_tokens=1024,
            max_response_tokens=1024,
            micro_batch_tokens=16384,
        ),
        Shape(
            name="tiny",
            config=_llama(
                num_hidden_layers=2,
                hidden_size=128,
                intermediate_size=256,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                vocab_size=512,
                max_position_embeddings=256,
                rope_theta=10000.0,
                bos_token_id=1,
                eos_token_id=2,
            ),
            max_prompt_tokens=48,
            max_response_tokens=48,
            micro_batch_tokens=512,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Prompt and response tokens of each sample, both [B] int64."""

    prompts: Tensor
    responses: Tensor

    @property
    def totals(self) -> Tensor:
        return self.prompts + self.responses

    def first(self, count: int) -> "Lengths":
        return Lengths(prompts=self.prompts[:count], responses=self.responses[:count])


def draw_lengths(
    shape: Shape, *, num_samples: int, responses_per_prompt: int = 1, seed: int = LENGTHS_SEED
) -> Lengths:
    """Lognormal lengths, cut at the shape's longest; the responses to one prompt share its length.

    The samples of one prompt follow each other, as a rollout gives them.
    """
    generator = torch.Generator().manual_seed(seed)
    num_prompts = math.ceil(num_samples / responses_per_prompt)
    prompts = _lognormal(
        num_prompts,
        median=PROMPT_MEDIAN * shape.max_prompt_tokens,
        sigma=PROMPT_SIGMA,
        longest=shape.max_prompt_tokens,
        generator=generator,
    )
    responses = _lognormal(
        num_prompts * responses_per_prompt,
        median=RESPONSE_MEDIAN * shape.max_response_tokens,
        sigma=RESPONSE_SIGMA,
        longest=shape.max_response_tokens,
        generator=generator,
    )
    found = Lengths(prompts=prompts.repeat_interleave(responses_per_prompt), responses=responses)
    return found.first(num_samples)


def lengths_of_about(shape: Shape, *, num_tokens: int, seed: int = LENGTHS_SEED) -> Lengths:
    """As many samples as fit into `num_tokens` tokens, prompts included."""
    enough = num_tokens // 2 + 1  # a sample has two tokens at least
    found = draw_lengths(shape, num_samples=enough, seed=seed)
    return found.first(max(int((found.totals.cumsum(0) <= num_tokens).sum()), 1))


def _lognormal(
    count: int, *, median: float, sigma: float, longest: int, generator: torch.Generator
) -> Tensor:
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    return (median * (sigma * normal).exp()).round().clamp(1, longest).long()


def random_batch(lengths: Lengths, *, vocab_size: int, seed: int = 0) -> RaggedBatch:
    """Samples of these lengths with random tokens, and all that a PPO step has made of them before
    its updates. Log-probs are those of a model with random weights, near -log(vocab_size)."""
    generator = torch.Generator().manual_seed(seed)
    num_samples, num_responses = len(lengths.prompts), int(lengths.responses.sum())
    num_tokens = int(lengths.totals.sum())

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(num_responses, generator=generator)

    batch = RaggedBatch(
        tokens=torch.randint(0, vocab_size, (num_tokens,), generator=generator),
        prompt_lengths=lengths.prompts.clone(),
        response_lengths=lengths.responses.clone(),
    )
    values, advantages = noise(0.1), noise(1.0)
    old_logprobs = -math.log(vocab_size) + noise(0.2)
    batch.sample = {
        "prompt_ids": torch.arange(num_samples),
        "sample_indices": torch.zeros(num_samples, dtype=torch.int64),
        "truncated": lengths.responses == lengths.responses.max(),
        "rewards": torch.randn(num_samples, generator=generator),
    }
    batch.response = {
        "loss_mask": torch.ones(num_responses),
        "old_logprobs": old_logprobs,
        "rollout_logprobs": old_logprobs + noise(0.01),
        "ref_logprobs": old_logprobs + noise(0.02),
        "values": values,
        "advantages": advantages,
        "returns": values + advantages,
    }
    return batch


def prompt_token_ids(batch: RaggedBatch) -> list[tuple[int, ...]]:
    """The prompt of each sample."""
    starts = batch.cu_seqlens[:-1]
    flat = batch.tokens[ragged_ranges(starts, batch.prompt_lengths)]
    return [tuple(part.tolist()) for part in flat.split(batch.prompt_lengths.tolist())]
