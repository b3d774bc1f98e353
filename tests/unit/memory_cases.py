"""Models and configurations that the planner's tests share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_megatron.config import Config
from rlhf_megatron.layout.architecture import ModelArchitecture, read_architecture
from rlhf_megatron.memory.plan import Machine, MemoryPlan, RoleModels, plan_memory
from rlhf_megatron.memory.suggestions import changed

ROOT = Path(__file__).parents[2]
LLAMA_13B = read_architecture(ROOT / "configs" / "models" / "Llama-2-13b")
LLAMA_70B = read_architecture(ROOT / "configs" / "models" / "Llama-3.3-70B")
LLAMA_7B = replace(
    LLAMA_13B,
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=11008,
    num_attention_heads=32,
    num_key_value_heads=32,
)
LLAMA_405B = replace(
    LLAMA_70B,
    num_layers=126,
    hidden_size=16384,
    ffn_hidden_size=53248,
    num_attention_heads=128,
)
LLAMA_8B = replace(
    LLAMA_70B, num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32
)

ROLES = ("actor", "critic", "ref")
TRAINED = ("actor", "critic")


def layouts(*, tp: int, pp: int = 1) -> dict[str, Any]:
    """The same layout for all roles."""
    return {
        f"{role}.parallel.{key}": value
        for role in ROLES
        for key, value in (
            ("tensor_model_parallel_size", tp),
            ("pipeline_model_parallel_size", pp),
            ("sequence_parallel", tp > 1),
        )
    }


def offloaded(*parts: str, value: bool = True) -> dict[str, Any]:
    """`parts` (optimizer, gradients, weights) of actor and critic, and the reference."""
    keys = {f"{role}.offload_{part}": value for role in TRAINED for part in parts}
    return keys | {"ref.offload": value}


def config_of(**sections: dict[str, Any]) -> Config:
    """A complete configuration with these values; the argument names are of no account."""
    values = {
        "run.output_dir": "runs/x",
        "data.prompts": "data/prompts.jsonl",
        "actor.model": "models/x",
        "actor.recompute.granularity": "full",
        "critic.recompute.granularity": "full",
        "reward.function": "file.py:name",
        "rollout.engine": "vllm",
        "rollout.prompts_per_step": 512,
        "ppo.mini_batch_samples": 512,
    }
    for section in sections.values():
        values |= section
    return changed(Config(), values=values)


def machine_of(world_size: int, *, gpu_gb: float, host_gb: float = 0) -> Machine:
    return Machine(
        world_size=world_size,
        gpu_memory_bytes=int(gpu_gb * 1e9),
        gpus_per_node=min(8, world_size),
        host_memory_bytes=int(host_gb * 1e9) or None,
    )


def plan_of(
    config: Config,
    *,
    model: ModelArchitecture,
    machine: Machine,
    critic: ModelArchitecture | None = None,
    lora_rank: int = 0,
) -> MemoryPlan:
    models = RoleModels(actor=model, critic=critic or model, ref=model)
    return plan_memory(config, models=models, machine=machine, lora_rank=lora_rank)
