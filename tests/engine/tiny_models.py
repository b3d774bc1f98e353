"""Tiny random models made by transformers, and the oracles that transformers gives."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from rlhf_megatron.rollout.contract import Prompt, RolloutEngine

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 259, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "one_kv_head_tied": {"vocab_size": 61, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen2": {"vocab_size": 101, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen3": {"vocab_size": 99, "num_key_value_heads": 2, "head_dim": 64},
    "mistral": {"vocab_size": 103, "num_key_value_heads": 2, "sliding_window": 40},
    "yarn": {
        "vocab_size": 97,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
}
FAMILIES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
"""kind -> prefix of transformers' classes; Llama for the others."""
EOS = 1


def make_model(kind: str, *, seed: int) -> Any:
    """A float32 model of 2 layers whose distributions are neither flat nor peaked."""
    settings = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "pad_token_id": 2,
        **KINDS[kind],
    }
    model_class = getattr(transformers, FAMILIES.get(kind, "Llama") + "ForCausalLM")
    model: Any = model_class(model_class.config_class(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.12 * noise)
    return model.float().eval()


def save_config(kind: str, directory: Path) -> Path:
    """A model directory with config.json alone: engines read no weights."""
    model = make_model(kind, seed=0)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float32"
    model.config.save_pretrained(directory)
    return directory


def write_weights(engine: RolloutEngine, *, model: Any, version: int) -> None:
    """Write a model's weights in place, box by box, as a resharding does."""
    state = model.state_dict()
    parameters = engine.parameters()
    for place in engine.layout():
        target = parameters[place.parameter][place.region(place.box)]
        target.copy_(state[place.tensor][place.box.slices()])
    engine.weights_written(version=version)


def make_prompts(vocab_size: int, *, lengths: Sequence[int], first_id: int = 0) -> list[Prompt]:
    return [
        Prompt(
            prompt_id=first_id + i,
            token_ids=(0, *(3 + (i * 37 + j * 11) % (vocab_size - 3) for j in range(length - 1))),
        )
        for i, length in enumerate(lengths)
    ]


@torch.no_grad()
def greedy_oracle(model: Any, *, prompt: Prompt, tokens: int) -> list[int]:
    """transformers' own greedy decoding of one unpadded prompt, ended by EOS."""
    ids = torch.tensor([prompt.token_ids])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=2,
    )
    return output[0, len(prompt.token_ids) :].tolist()  # type: ignore[no-any-return]


@torch.no_grad()
def logprob_oracle(
    model: Any, *, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> torch.Tensor:
    """Log-probs of the response tokens by one plain forward pass, [n]."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(ids).logits[0].float() / temperature
    states = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    return states.gather(1, torch.tensor(response)[:, None])[:, 0]
