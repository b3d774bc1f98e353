"""The small files of an exported Hugging Face directory: config, generation config, tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.layout.tensors import Head

_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def write_config_files(
    output_dir: Path, *, template_dir: Path, arch: ModelArchitecture, head: Head, dtype: str
) -> None:
    """Copy what describes model and tokenizer from `template_dir`; adapt config.json.

    `dtype`: name of the torch dtype of the written weights.
    """
    config = json.loads((template_dir / "config.json").read_text())
    (output_dir / "config.json").write_text(
        json.dumps(_adapted(config, arch=arch, head=head, dtype=dtype), indent=2) + "\n"
    )
    for name in _COPIED:
        if (template_dir / name).exists() and not (head == "value" and name.startswith("gener")):
            shutil.copyfile(template_dir / name, output_dir / name)


def _adapted(
    config: dict[str, Any], *, arch: ModelArchitecture, head: Head, dtype: str
) -> dict[str, Any]:
    """A value model is a sequence-classification model with one label."""
    suffix = "ForSequenceClassification" if head == "value" else "ForCausalLM"
    config = config | {"architectures": [arch.family_definition.class_prefix + suffix]}
    # One of the two spellings: transformers 5 writes `dtype`, 4 `torch_dtype`.
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    config[key] = dtype
    for name in ("id2label", "label2id", "num_labels", "problem_type"):
        config.pop(name, None)
    if head == "value":
        config |= {
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "problem_type": "regression",
        }
    return config
