"""What differs between the supported versions of torch and Megatron-Core, for the models."""

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.errors import UserError


@cache
def _varlen_keywords() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def varlen_attention(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """torch's variable-length flash attention, causal: [T, H, D] x [T, G, D] -> [T, H, D].

    `sliding_window`: keys that a query sees, its own among them; None for all before it.
    torch 2.10 names causality is_causal; 2.11 and later take window_size=(-1, 0).
    """
    from torch.nn.attention.varlen import varlen_attn

    known = _varlen_keywords()
    options: dict[str, Any] = {}
    if "window_size" in known:
        options["window_size"] = (-1 if sliding_window is None else sliding_window - 1, 0)
    elif sliding_window is None:
        options["is_causal"] = True
    else:
        raise UserError("sliding_window: needs torch 2.11 or later on a GPU; upgrade torch")
    if "scale" in known:
        options["scale"] = scale
    elif scale != query.size(-1) ** -0.5:
        query = query * (scale * query.size(-1) ** 0.5)
    if query.size(1) != key.size(1):
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:
            repeats = query.size(1) // key.size(1)
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    out: Tensor = varlen_attn(  # type: ignore[assignment]  # a tuple only where asked for
        query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options
    )
    return out


def transformer_engine_imports() -> bool:
    """Whether Transformer Engine can be used by Megatron-Core in this process."""
    if not torch.cuda.is_available():
        return False
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, OSError):
        return False
    return True
