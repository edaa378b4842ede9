"""Attention's calls of the native core: CPU and CUDA."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.attention.problem import AttentionProblem
from fasttfm.kernels.common.rows import contiguous_like, contiguous_rows


def outputs_like(q: Tensor) -> tuple[Tensor, Tensor]:
    """Room for out, of q's shape, and for lse."""
    *leading, tokens, heads, _ = q.shape
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return contiguous_like(q), torch.empty(*leading, heads, tokens, dtype=statistics, device=q.device)


def forward_cpu(q: Tensor, k: Tensor, v: Tensor, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    core, threads = _native.core(), torch.get_num_threads()
    out, lse = outputs_like(q)
    workspace = torch.empty(core.attention_forward_workspace(q.shape[-1], threads), dtype=torch.float32)
    core.attention_forward_cpu(
        **_fields(q, k, v, problem),
        workspace=workspace.data_ptr(),
        threads=threads,
        out=out.data_ptr(),
        lse=lse.data_ptr(),
    )
    return out, lse


def forward_cuda(q: Tensor, k: Tensor, v: Tensor, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    out, lse = outputs_like(q)
    workspace = torch.empty(1, dtype=torch.int32, device=q.device)
    _native.core().attention_forward_cuda(
        **_fields(q, k, v, problem),
        workspace=workspace.data_ptr(),
        device=q.get_device(),
        stream=_native.stream(q),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
    )
    return out, lse


def backward_cpu(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: AttentionProblem,
    *gradients: Tensor,
) -> None:
    """Writes the ``gradients`` dq, dk and dv."""
    core, threads = _native.core(), torch.get_num_threads()
    size = core.attention_backward_workspace(problem.max_seqlen, problem.max_seqlen_k, q.shape[-1], threads)
    workspace = torch.empty(size, dtype=torch.float32)
    core.attention_backward_cpu(
        **_fields(q, k, v, problem),
        **_backward_fields(dout, out, lse, *gradients),
        workspace=workspace.data_ptr(),
        threads=threads,
    )


def backward_cuda(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: AttentionProblem,
    *gradients: Tensor,
    column_sums: Tensor | None = None,
) -> None:
    """Writes the ``gradients`` dq, dk and dv, and into ``column_sums``, [3 H D], their sums over all tokens."""
    if q.numel() == 0 or k.numel() == 0:
        for gradient in (*gradients, column_sums):
            if gradient is not None:
                gradient.zero_()
        return
    dout = contiguous_rows(dout)
    core = _native.core()
    *tokens, heads, head_dim = q.shape
    longest = max(problem.max_seqlen, problem.max_seqlen_k)
    size = core.attention_backward_workspace_cuda(problem.sequences, heads, head_dim, math.prod(tokens), longest)
    parts = 0
    if column_sums is not None:
        parts = core.attention_column_parts_cuda(problem.sequences, heads, head_dim, problem.max_seqlen)
    workspace = torch.empty(size + parts, dtype=torch.float32, device=q.device)
    core.attention_backward_cuda(
        **_fields(q, k, v, problem),
        **_backward_fields(dout, out, lse, *gradients),
        workspace=workspace.data_ptr(),
        device=q.get_device(),
        stream=_native.stream(q),
        column_sums=_native.address(column_sums),
        column_sums_dtype=_native.DTYPE_CODES[q.dtype if column_sums is None else column_sums.dtype],
        column_parts=workspace.data_ptr() + 4 * size,
    )


_COLUMN_PARTS_TOKENS = 64  # of a sequence: what it takes to sum columns would be a quarter of the gradients' bytes


def sums_columns(q: Tensor, problem: AttentionProblem) -> bool:
    """Whether ``backward_cuda`` can give ``column_sums`` of gradients of q, k and v, and with gain.

    Each sequence has places of its own for them, so that there should not be many sequences of few tokens.
    """
    *tokens, _, head_dim = q.shape
    return head_dim == 64 and math.prod(tokens) >= _COLUMN_PARTS_TOKENS * problem.sequences


def _fields(q: Tensor, k: Tensor, v: Tensor, problem: AttentionProblem) -> dict[str, int | float]:
    return {
        **_strided("q", q),
        **_strided("k", k),
        **_strided("v", v),
        "cu_seqlens": _native.address(problem.cu_seqlens),
        "cu_seqlens_k": _native.address(problem.cu_seqlens_k),
        "lengths": _native.address(problem.lengths),
        "lengths_k": _native.address(problem.lengths_k),
        "seed": _native.address(problem.seed),
        "sequences": problem.sequences,
        "heads": q.shape[-2],
        "kv_heads": k.shape[-2],
        "head_dim": q.shape[-1],
        "queries": q.shape[-3],
        "keys": k.shape[-3],
        "max_seqlen": problem.max_seqlen,
        "max_seqlen_k": problem.max_seqlen_k,
        "window_left": problem.window_left,
        "window_right": problem.window_right,
        "scale": problem.scale,
        "threshold": problem.threshold,
        "dropout_scale": problem.dropout_scale,
        "dtype": _native.DTYPE_CODES[q.dtype],
    }


def _backward_fields(dout: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> dict[str, int]:
    return {
        "dout": dout.data_ptr(),
        "out": out.data_ptr(),
        "lse": lse.data_ptr(),
        **_strided("dq", dq),
        **_strided("dk", dk),
        **_strided("dv", dv),
    }


_STRIDES = {
    name: (f"{name}_sequence_stride", f"{name}_token_stride", f"{name}_head_stride")
    for name in ("q", "k", "v", "dq", "dk", "dv")
}


def _strided(name: str, x: Tensor) -> dict[str, int]:
    """Where [B, S, H, D] or [T, H, D] lies; packed rows are no sequence's, so that stride is 0."""
    strides, (sequence, token, head) = x.stride(), _STRIDES[name]
    return {
        name: x.data_ptr(),
        sequence: strides[0] if len(strides) == 4 else 0,
        token: strides[-3],
        head: strides[-2],
    }
