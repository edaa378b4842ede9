"""Attention's backward, whose gradient of qkv is cast to FP8 by its own kernel on Hopper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.ops import attention_choice, attention_native, fp8
from fasttfm.ops.attention import TABLE, AttentionProblem
from fasttfm.ops.fp8 import Quantized, Slot, native

_HEAD_DIM = 64


def refuse(qkv: Tensor, problem: AttentionProblem, slot: Slot, backend: str | None) -> str | None:
    """Why the kernel does not support the gradient of qkv [T, 3, H, D]; None if it does."""
    if (reason := _native.missing_hopper()) is not None:
        return reason
    if slot.measuring:
        return "takes a known scale"
    if qkv.dtype != torch.bfloat16:
        return f"takes bfloat16, got {qkv.dtype}"
    if qkv.shape[-1] != _HEAD_DIM:
        return f"takes head dim {_HEAD_DIM}, got {qkv.shape[-1]}"
    if problem.cu_seqlens is None or attention_native.has_window(problem):
        return "takes packed sequences without a window"
    if qkv.numel() == 0:
        return "takes at least one token"
    if (reason := native.refuse(qkv.flatten(1))) is not None:
        return reason
    q, k, v = qkv.unbind(1)
    chosen = TABLE.select_backward(backend, q, k, v, **attention_choice.options_of(problem))
    return None if chosen.name == "cuda" else f"backend {chosen.name!r} computes attention's backward"


def backward_cast(
    dout: Tensor,
    qkv: Tensor,
    saved: tuple[Tensor, Tensor],
    options: tuple[Any, ...],
    slot: Slot,
    sums_dtype: torch.dtype | None,
) -> tuple[Quantized, Tensor | None] | None:
    """The gradient of qkv [T, 3, H, D] in FP8 in both layouts, rounded from the kernel's fp32 sums, and, with a
    ``sums_dtype``, its sums over all tokens. None if the kernel does not support the call.

    Args:
        saved: out and lse of the forward.
        options: Those of attention's registered backward.
    """
    *others, backend = options
    problem = AttentionProblem(*others)
    if refuse(qkv, problem, slot, backend) is not None:
        return None
    if sums_dtype is not None and not attention_native.sums_columns(qkv[:, 0], problem):
        return None
    tokens = qkv.shape[0]
    longest = min(problem.max_seqlen, tokens)
    problem = problem._replace(max_seqlen=longest, max_seqlen_k=longest)
    rows, columns = fp8.empty_layouts(qkv.flatten(1), slot.dtype)
    sums = None if sums_dtype is None else torch.empty(rows.shape[1], dtype=sums_dtype, device=qkv.device)
    cast = (slot.scale, slot.amax, rows, columns, int(slot.dtype == fp8.E5M2))
    attention_native.backward_fp8(dout, qkv, *saved, problem, cast, sums)
    return Quantized(rows, columns, slot.inverse), sums
