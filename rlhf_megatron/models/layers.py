"""The project's own norm, attention core and rotary embedding, and the layer spec around them.

Megatron-Core's local layers refuse sequence parallelism (torch_norm.py:32) and packed sequences
(dot_product_attention.py) without Transformer Engine; these modules lift both through ModuleSpec.

Shape letters: T packed tokens, H heads, G key-value heads, D head dimension.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from rlhf_megatron.layout.architecture import ModelArchitecture
from rlhf_megatron.models.compat import varlen_attention
from rlhf_megatron.models.packing import PackedSequences
from rlhf_megatron.models.rope import rope


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv:1910.07467) that knows about sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each rank sees a part of the tokens: finalize_model_grads then
        # adds the weight's gradients over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PackedAttention(nn.Module):
    """Causal attention within each packed sequence: to all tokens before, or to the last
    `sliding_window` of them, the token itself included.

    On a GPU in half precision: the variable-length flash kernel of torch. Elsewhere: scaled dot
    product attention over the sequences of equal length at once, so nothing is padded.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        *,
        sliding_window: int | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,  # [T, 1, H, D]
        key: Tensor,  # [T, 1, G, D]
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences,
    ) -> Tensor:
        q, k, v = query[:, 0], key[:, 0], value[:, 0]
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            out = varlen_attention(
                q,
                key=k,
                value=v,
                cu_seqlens=packed_seq_params.cu_seqlens_q,
                max_seqlen=packed_seq_params.max_seqlen_q,
                scale=self.scale,
                sliding_window=self.sliding_window,
            )
        else:
            out = self._by_equal_length(q, k, v, packed_seq_params)
        return out.reshape(out.size(0), 1, -1)

    def _by_equal_length(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences) -> Tensor:
        outs = []
        for rows in packed.equal_length_rows:  # [n, length]
            mask = self._window_mask(rows.size(1), device=q.device)
            out = F.scaled_dot_product_attention(  # [n, heads, length, D]
                q[rows].transpose(1, 2),
                k[rows].transpose(1, 2),
                v[rows].transpose(1, 2),
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=q.size(1) != k.size(1),
            )
            outs.append(out.transpose(1, 2).reshape(-1, q.size(1), q.size(2)))
        return torch.cat(outs)[packed.row_of_token]

    def _window_mask(self, length: int, *, device: torch.device) -> Tensor | None:
        """[length, length], true where a query (row) sees a key; None where all are in reach."""
        if self.sliding_window is None or length <= self.sliding_window:
            return None
        every = torch.ones(length, length, dtype=torch.bool, device=device)
        return every.tril() & every.triu(1 - self.sliding_window)


class PackedRotaryEmbedding(RotaryEmbedding):
    """Rotary angles (arXiv:2104.09864) at each packed token's own position."""

    def __init__(self, arch: ModelArchitecture, *, device: torch.device, cp_group: Any) -> None:
        super().__init__(
            kv_channels=arch.head_dim,
            rotary_percent=1.0,
            rotary_base=arch.rope_theta,  # type: ignore[arg-type]
            use_cpu_initialization=device.type == "cpu",
            cp_group=cp_group,
        )
        self.inv_freq = rope(arch).frequencies.to(device)

    def get_rotary_seq_len(  # type: ignore[override]
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor,
        transformer_config: Any,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> Tensor:
        """GPTModel hands what this returns to `forward`: the positions in place of a length."""
        assert packed_seq_params.position_ids is not None
        return packed_seq_params.position_ids

    def forward(self, position_ids: Tensor, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        """[T] positions -> [T, 1, 1, D] angles in float32."""
        angles = torch.outer(position_ids.to(torch.float32), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


def block_spec(
    arch: ModelArchitecture, *, num_layers: int, transformer_engine: bool
) -> TransformerBlockSubmodules:
    """One pipeline stage's `num_layers` decoder layers and its final norm: Transformer Engine's
    linears and norms, or Megatron-Core's local linears with our norm; our attention core in both.
    """
    if transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=arch.qk_norm)
    else:
        norm = RMSNorm
        spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=arch.qk_norm)
        spec.submodules.input_layernorm = RMSNorm
        spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = norm
    attention.core_attention = ModuleSpec(
        module=PackedAttention, params={"sliding_window": arch.sliding_window}
    )
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=norm)
