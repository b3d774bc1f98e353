"""What a model is, read from a Hugging Face directory and audited field by field."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_megatron.errors import UserError
from rlhf_megatron.layout.families import FAMILIES
from rlhf_megatron.layout.hf_config import (
    audit_common,
    audit_unknown_fields,
    eos_token_ids,
    head_of,
    num_labels_of,
)
from rlhf_megatron.layout.rope_config import read_rope
from rlhf_megatron.layout.rules import Family, ModelRules


@dataclass(frozen=True, kw_only=True)
class ModelArchitecture:
    """The numbers that define a decoder-only model. Sizes count elements, not bytes."""

    family: str
    """Key of rlhf_megatron.layout.families.FAMILIES."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the embedding as Hugging Face stores it, without padding."""
    tie_word_embeddings: bool
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    """None, or `rope_type` (llama3, linear or yarn) and its parameters, named as in config.json
    (layout/rope_config.py lists them)."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """Root-mean-square norms of each head's query and key (Qwen3)."""
    sliding_window: int | None = None
    """A token attends to itself and at most sliding_window - 1 tokens before it; None: to all."""
    max_position_embeddings: int = 2048
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"
    """Name of the torch dtype of the stored weights."""
    head: Literal["lm", "classification"] = "lm"
    num_labels: int = 0
    """Rows of `score.weight` of a classification head; 0 for a language model."""

    @property
    def family_definition(self) -> Family:
        return FAMILIES[self.family]

    @property
    def rules(self) -> ModelRules:
        return self.family_definition.rules(self)


def read_architecture(directory: str | Path) -> ModelArchitecture:
    """Read config.json (and the EOS ids of generation_config.json, where there is one).

    Raises UserError, listing every problem: no such file, an unknown family, or a field whose value
    this project's models would not honour.
    """
    return read_architecture_file(Path(directory) / "config.json")


def read_architecture_file(path: Path) -> ModelArchitecture:
    """The same from a config.json, whatever its name. Weights and tokenizer need not be there."""
    config = _read_json(path)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(
            f"{path}: model_type {config.get('model_type')!r} is not supported; known: {known}"
        )
    config = {**family.defaults, **config}
    problems = [
        *audit_common(config),
        *family.audit(config),
        *audit_unknown_fields(config, known=family.fields),
    ]
    rope = read_rope(config)
    problems += rope.problems
    if problems:
        raise UserError(
            f"{path}: this model is not supported as it is described\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )
    generation_path = path.with_name("generation_config.json")
    generation = _read_json(generation_path) if generation_path.exists() else {}
    heads = int(config["num_attention_heads"])
    return ModelArchitecture(
        family=family.name,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        sliding_window=config["sliding_window"] if family.sliding_window else None,
        max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
        eos_token_ids=eos_token_ids(config, generation=generation),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        head=head_of(config),
        num_labels=num_labels_of(config) if head_of(config) == "classification" else 0,
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; give a Hugging Face model directory, with config.json in it"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content
