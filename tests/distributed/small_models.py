"""Tiny random models that transformers makes, and what it says of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from rlhf_megatron.batch import RaggedBatch, from_sequences

VOCAB_SIZE = 131
"""No multiple of anything: it is padded to 192 by Megatron-Core's layout."""

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "reference": {"seed": 5},
    "one_kv_head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "qwen2": {"model": "Qwen2ForCausalLM"},
    "critic": {"model": "LlamaForSequenceClassification", "seed": 3},
    "one_kv_head_critic": {
        "model": "LlamaForSequenceClassification",
        "num_key_value_heads": 1,
        "seed": 4,
    },
}


def make_model(kind: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """A model of 4 layers whose distributions are neither flat nor peaked."""
    options = {"model": "LlamaForCausalLM", "seed": 0, **KINDS[kind]}
    name, seed = options.pop("model"), options.pop("seed")
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        **({"num_labels": 1} if name.endswith("Classification") else {}),
        **options,
    }
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in parameter_name else 0.1 * noise)
    return model.to(dtype).eval()


def save_models(rank: int, folder: Path) -> None:
    """A directory of each kind under `folder`."""
    for kind in KINDS:
        make_model(kind).save_pretrained(folder / kind)


def make_batch(
    prompt_lengths: Sequence[int], *, response_lengths: Sequence[int], seed: int = 1
) -> RaggedBatch:
    """Random tokens of the given lengths, and random weights `w` for their log-probs."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> list[int]:
        return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()

    batch = from_sequences(
        [tokens(n) for n in prompt_lengths], responses=[tokens(n) for n in response_lengths]
    )
    batch.response["w"] = torch.randn(batch.num_response_tokens, generator=generator)
    return batch


def sample_of(batch: RaggedBatch, index: int) -> Tensor:
    """One sample's tokens, [1, n]."""
    return torch.tensor([batch.prompt_tokens(index) + batch.response_tokens(index)])


def response_log_probs(model: Any, *, batch: RaggedBatch, temperature: float) -> Tensor:
    """The tempered log-distribution that each response token was drawn from, [R, V]; one sample at
    a time, without packing or padding. Differentiable."""
    rows = []
    for index in range(len(batch)):
        first = int(batch.prompt_lengths[index]) - 1
        logits = model(sample_of(batch, index)).logits[0]
        rows.append((logits[first:-1] / temperature).log_softmax(dim=-1))
    return torch.cat(rows)


def response_targets(batch: RaggedBatch) -> Tensor:
    """The response tokens, [R]."""
    return torch.tensor([t for index in range(len(batch)) for t in batch.response_tokens(index)])


def token_values(model: Any, *, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
    """By a classifier's backbone and head: the value before each response token, [R], and after
    each sample's last token, [B]. Differentiable."""
    values, last = [], []
    for index in range(len(batch)):
        first = int(batch.prompt_lengths[index]) - 1
        hidden = model.model(sample_of(batch, index)).last_hidden_state[0]
        every = hidden @ model.score.weight[0]
        values.append(every[first:-1])
        last.append(every[-1])
    return torch.cat(values), torch.stack(last)
