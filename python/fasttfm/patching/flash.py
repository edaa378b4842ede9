"""FlashAttention's functions over fasttfm's attention, and the place where transformers looks them up.

transformers and sentence-transformers ask ``lazy_import_flash_attention`` for the functions of an attention
implementation whose name contains "flash"; without a varlen function there the inputs stay padded.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from transformers import modeling_flash_attention_utils as utils

from fasttfm import ops

NAME = "fasttfm_flash"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of [B, S, H, D]. It is always deterministic; soft caps and attention sinks are refused."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    out = ops.attention(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """The same of packed sequences [T, H, D]."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    options |= {"cu_seqlens": cu_seqlens_q.int(), "max_seqlen": int(max_seqlen_q)}
    if cu_seqlens_k is not cu_seqlens_q:
        options |= {"cu_seqlens_k": cu_seqlens_k.int(), "max_seqlen_k": int(max_seqlen_k)}
    out = ops.attention(q, k, v, **options)
    assert isinstance(out, Tensor)
    return out


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float | None,
    alibi_slopes: Tensor | None,
    s_aux: Tensor | None,
) -> dict[str, Any]:
    for name, value in (("softcap", softcap or None), ("s_aux", s_aux)):
        if value is not None:
            raise ValueError(f"flash_attn_func: {name}: expected None (it is not supported), got a value")
    options: dict[str, Any] = {"causal": causal, "window": tuple(window_size), "scale": softmax_scale}
    return options | {"dropout_p": dropout_p, "alibi_slopes": alibi_slopes}


def register() -> None:
    """Makes ``lazy_import_flash_attention`` find these functions under NAME."""
    imports = utils._lazy_imports
    if getattr(imports, "_fasttfm", False):
        return

    @functools.wraps(imports)
    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation == NAME:
            return flash_attn_func, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input
        return imports(implementation, *args, **kwargs)

    lazy_imports._fasttfm = True  # type: ignore[attr-defined]
    utils._lazy_imports = lazy_imports
