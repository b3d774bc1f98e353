"""Random valid settings of a whole run: layouts, placements, algorithms, memory, families."""

from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ROLES = ("actor", "critic", "ref")
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True, "vocab_size": 67}),
    "one_kv_head": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24, "vocab_size": 65}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
}
PLACEMENTS = [
    (("actor", "ref", "rollout"), ("critic",)),
    (("actor", "rollout"), ("critic", "ref")),
    (("actor", "critic", "ref"), ("rollout",)),
    (("actor",), ("critic", "ref", "rollout")),
]


def make_families(folder: Path) -> None:
    """A random model of each family beneath the folder, with biases and norms that differ, and
    without a tokenizer."""
    for name, (config_class, model_class, changes) in FAMILIES.items():
        torch.manual_seed(4)
        settings = {
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        }
        model = model_class(config_class(**(settings | changes)))
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, float("norm" in key), 0.05)
        model.save_pretrained(folder / name)


def draw(seed: int) -> tuple[int, dict[str, Any]]:
    """World size and settings, with __ for dots. The rules between keys are heeded."""
    random = Random(seed)
    world_size = random.choice((1, 2, 2, 4, 4))
    found: dict[str, Any] = {"family": random.choice(list(FAMILIES))}
    precision = random.choice(("fp32", "fp32", "bf16"))
    found |= {f"{role}__precision": precision for role in ROLES}
    is_split = world_size > 1 and random.random() < 0.35
    is_shared = not is_split and random.random() < 0.2
    if is_split:
        found |= _placement(random, world_size=world_size)
    found |= _layouts(random, num_ranks=world_size // 2 if is_split else world_size)
    found |= _algorithm(random) | _memory(random) | _rest(random)
    if is_shared:
        found = {key: value for key, value in found.items() if not key.startswith("critic__")}
        same = {k: v for k, v in found.items() if k.startswith("actor__parallel")}
        found |= {key.replace("actor", "critic"): value for key, value in same.items()}
        found |= {"critic__shared_backbone": True, "critic__precision": precision}
        found |= {"critic__optimizer__learning_rate": 5e-6, "ppo__critic_warmup_steps": 0}
    return world_size, found


def _placement(random: Random, *, world_size: int) -> dict[str, Any]:
    half = world_size // 2
    groups = zip((range(half), range(half, world_size)), random.choice(PLACEMENTS), strict=True)
    text = ", ".join(
        f"{{ranks: {ranks[0]}-{ranks[-1]}, roles: [{', '.join(roles)}]}}" for ranks, roles in groups
    )
    found: dict[str, Any] = {"placement": f"[{text}]"}
    if random.random() < 0.4:
        found |= {"pipeline__depth": 1, "ppo__importance_sampling__cap": 2}
    return found


def _layouts(random: Random, *, num_ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for role in ROLES:
        key = f"{role}__parallel__"
        tp = random.choice([n for n in (1, 2) if num_ranks % n == 0])
        pp = random.choice([n for n in (1, 2) if num_ranks % (tp * n) == 0])
        found[f"{key}tensor_model_parallel_size"] = tp
        found[f"{key}pipeline_model_parallel_size"] = pp
        found[f"{key}sequence_parallel"] = tp > 1 and random.random() < 0.5
        found[f"{key}virtual_pipeline_model_parallel_size"] = random.choice((1, 2)) if pp > 1 else 1
        found[f"{key}grid_order"] = random.choice(("tp-dp-pp", "tp-pp-dp", "pp-tp-dp", "dp-tp-pp"))
    return found


def _algorithm(random: Random) -> dict[str, Any]:
    prompts, responses = random.choice((4, 6)), random.choice((1, 2))
    samples = prompts * responses
    place = random.choice(("reward", "loss", "off"))
    return {
        "rollout__prompts_per_step": prompts,
        "rollout__responses_per_prompt": responses,
        "rollout__max_response_tokens": random.choice((1, 6, 12)),
        "rollout__seed_per": random.choice(("request", "engine")),
        "ppo__mini_batch_samples": random.choice((samples, samples // 2)),
        "ppo__epochs": random.choice((1, 2)),
        "ppo__micro_batch_tokens": random.choice((40, 200, 2048)),
        "ppo__micro_batch_samples": random.choice((0, 0, 1, 3)),
        "ppo__kl__place": place,
        "ppo__kl__estimator": random.choice(("k2", "k3")) if place == "loss" else "k1",
        "ppo__kl__adaptive": place != "off" and random.random() < 0.4,
        "ppo__aggregation": random.choice(("token_mean", "sequence_mean", "sequence_sum_norm")),
        "ppo__truncated": random.choice(("bootstrap", "zero", "mask", "penalty")),
        "ppo__value_clip": random.choice((0, 0.2)),
        "ppo__entropy_coefficient": random.choice((0, 0.01)),
        "ppo__dual_clip": random.choice((0, 3)),
        "ppo__critic_warmup_steps": random.choice((0, 0, 1)),
        "ppo__target_kl": random.choice((0, 0, 1e-4)),
        "ppo__reward_clip": random.choice((0, 0.5)),
        "ppo__whiten_advantages": random.choice((True, False)),
    }


def _memory(random: Random) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ref__offload": random.random() < 0.3,
        "actor__kept_logits_gb": random.choice((0, 1)),
        "reshard__bucket_mb": random.choice((0.01, 0.3, 256)),
        "rollout__weight_update": random.choice(("auto", "auto", "reload")),
    }
    for role in ("actor", "critic"):
        for kind in ("weights", "gradients", "optimizer"):
            found[f"{role}__offload_{kind}"] = random.random() < 0.25
        recompute = random.choice(("none", "none", "selective", "full"))
        found[f"{role}__recompute__granularity"] = recompute
        overlaps = random.random() < 0.4
        found[f"{role}__optimizer__overlap_grad_reduce"] = overlaps
        found[f"{role}__optimizer__overlap_param_gather"] = overlaps and random.random() < 0.5
        found[f"{role}__optimizer__clip_grad"] = random.choice((0, 1, 1))
        found[f"{role}__optimizer__schedule"] = random.choice(("constant", "linear", "cosine"))
    return found


def _rest(random: Random) -> dict[str, Any]:
    return {
        "reshard__verify": random.choice(("first", "always")),
        "reward__workers": random.choice((0, 0, 2)),
        "reward__on_error": random.choice(("stop", "drop", "value")),
        "warmup__steps": random.choice((0, 1)),
        "evaluation__max_prompts": random.choice((3, 8)),
        "evaluation__responses_per_prompt": random.choice((1, 2)),
        "evaluation__max_response_tokens": random.choice((0, 14)),
        "checkpoint__asynchronous": random.choice((True, False)),
        "faults__bad_step": random.choice(("stop", "skip")),
        "logging__tensorboard": random.random() < 0.3,
    }
