"""The registry of model families, by `model_type` of config.json."""

from rlhf_megatron.layout.families import llama, qwen2
from rlhf_megatron.layout.rules import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (llama.FAMILY, qwen2.FAMILY)}
