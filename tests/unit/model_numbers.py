"""A model's architecture as far as the configuration's rules read it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Numbers:
    num_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    hidden_size: int = 64
    head_dim: int = 8
    ffn_hidden_size: int = 96
    vocab_size: int = 100
    max_position_embeddings: int = 2048
