"""The project's own norm and attention core, and the layer spec around them.

Megatron-Core's local layers refuse sequence parallelism (torch_norm.py:32) and packed sequences
(dot_product_attention.py) without Transformer Engine; these modules lift both through ModuleSpec.

Shape letters: T packed tokens, H heads, G key-value heads, D head dimension.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
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
from rlhf_megatron.models.rotary import Rotary


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
    `sliding_window` of them, the token itself included. Queries and keys are turned here
    (rotary.py), so that all layers share one set of angles.

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
        rotary: Rotary,
        **_: Any,
    ) -> None:
        """rotary: shared by the layers. No module: a model in bf16 would round its frequencies, and
        far positions would turn wrongly."""
        super().__init__()
        self.rotary = rotary
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
        assert packed_seq_params.position_ids is not None
        angles = self.rotary.at(packed_seq_params.position_ids, dtype=query.dtype)
        q, k, v = angles.apply(query[:, 0]), angles.apply(key[:, 0]), value[:, 0]
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            out = self._flash(q, k, v, packed_seq_params)
        else:
            out = self._by_equal_length(q, k, v, packed_seq_params)
        return out.reshape(out.size(0), 1, -1)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences) -> Tensor:
        return varlen_attention(
            q,
            key=k,
            value=v,
            cu_seqlens=packed.cu_seqlens_q,
            max_seqlen=packed.max_seqlen_q,
            scale=self.scale,
            sliding_window=self.sliding_window,
        )

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


class TransformerEngineAttention(PackedAttention):
    """The same on a GPU in half precision through Transformer Engine, which takes flash-attn where
    it is installed, else cuDNN's fused attention."""

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        from transformer_engine.pytorch import DotProductAttention

        tp = config.tensor_model_parallel_size
        window = self.sliding_window
        self.fused = DotProductAttention(
            config.num_attention_heads // tp,
            config.kv_channels,
            num_gqa_groups=max(1, config.num_query_groups // tp),
            qkv_format="thd",
            attn_mask_type="padding_causal",
            window_size=None if window is None else (window - 1, 0),
            softmax_scale=self.scale,
        )

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences) -> Tensor:
        out: Tensor = self.fused(
            q,
            k,
            v,
            cu_seqlens_q=packed.cu_seqlens_q,
            cu_seqlens_kv=packed.cu_seqlens_kv,
            max_seqlen_q=packed.max_seqlen_q,
            max_seqlen_kv=packed.max_seqlen_kv,
        )
        return out


def block_spec(
    arch: ModelArchitecture, *, num_layers: int, transformer_engine: bool, device: torch.device
) -> TransformerBlockSubmodules:
    """One pipeline stage's `num_layers` decoder layers and its final norm: Transformer Engine's
    linears, norms and attention, or Megatron-Core's local linears with our norm and attention core.
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
        module=TransformerEngineAttention if transformer_engine else PackedAttention,
        params={
            "sliding_window": arch.sliding_window,
            "rotary": Rotary(rope(arch).frequencies.to(device)),
        },
    )
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=norm)
