"""The registry of model families, by `model_type` of config.json."""

from rlhf_megatron.layout.families import llama, mistral, qwen2, qwen3
from rlhf_megatron.layout.rules import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY for module in (llama, mistral, qwen2, qwen3)
}
