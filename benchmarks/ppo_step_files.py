"""What a PPO run needs on disk, made for benchmarks/ppo_step.py: model, tokenizer, prompts, reward.

Weights are random. The tokenizer has one word for each token id, `t17`, so that prompts of any
length can be written down, and come back as the same tokens.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from gpu_shapes import Shape
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.tensors import logical_tensors

REWARD = '''"""A reward that costs nothing: the share of even numbers among the last ten words."""


def reward(prompt, response, **fields):
    words = response.split()[-10:]
    return sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in words) / 10
'''


def write_model(shape: Shape, folder: Path, *, device: torch.device) -> ModelArchitecture:
    """config.json, random weights and the tokenizer."""
    arch = shape.write(folder)
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tensors = {}
    for tensor in logical_tensors(arch, head="lm"):
        if len(tensor.shape) == 1:
            tensors[tensor.name] = torch.ones(tensor.shape, dtype=dtype)
            continue
        noise = torch.randn(tensor.shape, device=device, generator=generator)
        tensors[tensor.name] = (0.02 * noise).to(dtype).cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(arch).save_pretrained(str(folder))
    return arch


def _tokenizer(arch: ModelArchitecture) -> PreTrainedTokenizerFast:
    words = {f"t{number}": number for number in range(arch.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    eos = f"t{arch.eos_token_ids[0]}"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", eos_token=eos, pad_token="t0"
    )


def write_prompts(path: Path, prompts: Sequence[Sequence[int]]) -> None:
    rows = [{"prompt": " ".join(f"t{token}" for token in prompt)} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_reward(path: Path) -> None:
    path.write_text(REWARD)
