"""Attention's calls of the native core: CPU and CUDA. q may be qkv; k and v are None then."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.attention.problem import UNLIMITED, AttentionProblem
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.launch import multiprocessors
from fasttfm.kernels.common.rows import contiguous_like, contiguous_rows, empty_numbers

_NO_LIMIT = 2**40  # of a window, above any number of tokens


def outputs_like(q: Tensor) -> tuple[Tensor, Tensor]:
    """Room for out, of q's shape, and for lse."""
    *leading, tokens, heads, _ = q.shape
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return contiguous_like(q), torch.empty(*leading, heads, tokens, dtype=statistics, device=q.device)


def forward(q: Tensor, k: Tensor | None, v: Tensor | None, problem: AttentionProblem) -> tuple[Tensor, Tensor]:
    *leading, tokens, heads, _ = q.shape if k is not None else (*q.shape[:-3], *q.shape[-2:])
    lse = empty_numbers(q, *leading, heads, tokens)
    return infer(q, k, v, problem, lse), lse


def infer(
    q: Tensor, k: Tensor | None, v: Tensor | None, problem: AttentionProblem, lse: Tensor | None = None
) -> Tensor:
    """out, and with ``lse`` also its values."""
    q, k, v = _readable(q), _readable(k), _readable(v)
    if k is None:
        *leading, _, heads, columns = q.shape
        out = q.new_empty(*leading, heads, columns)
    else:
        out = contiguous_like(q)
    workspace = empty_numbers(q, 1) if q.is_cuda else None  # the core allocates the CPU's
    _native.core().attention_forward(q, k, v, _arguments(problem), out, lse, workspace)
    return out


def backward(
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
    """Writes the ``gradients`` dq, dk and dv, and into ``column_sums``, [3 H D], their sums over all tokens.

    If heads of q share those of k and v, a block of the CUDA kernels adds up dk and dv of some query heads of a group,
    or of all of them, and the rest is added up here."""
    if q.numel() == 0 or k.numel() == 0:
        for gradient in (*gradients, column_sums):
            if gradient is not None:
                gradient.zero_()
        return
    if not q.is_cuda or k.shape[-2] == q.shape[-2]:
        _run_backward(dout, q, k, v, out, lse, problem, *gradients, column_sums=column_sums)
        return
    heads = gradient_heads(q, k, problem, multiprocessors(q))
    if heads == k.shape[-2]:
        _run_backward(dout, q, k, v, out, lse, problem, *gradients)
        return
    if problem.seed is not None or q.shape[-1] < 64:
        k, v = (x.repeat_interleave(heads // x.shape[-2], dim=-2) for x in (k, v))
    terms = [x.new_empty(*x.shape[:-2], heads, x.shape[-1]) for x in (k, v)]
    _run_backward(dout, q, k, v, out, lse, problem, gradients[0], *terms)
    for gradient, some in zip(gradients[1:], terms, strict=True):
        torch.sum(some.unflatten(-2, (gradient.shape[-2], -1)), dim=-2, out=gradient)


def gradient_heads(q: Tensor, k: Tensor, problem: AttentionProblem, processors: int) -> int:
    """How many heads of dk and dv the CUDA kernels write; a group's query heads are divided among those of its head of
    k. Fewer save the pass that adds them up; more give work to more SMs."""
    left, right = (_NO_LIMIT if x == UNLIMITED else x for x in (problem.window_left, problem.window_right))
    sizes = (problem.sequences(q), problem.max_seqlen, problem.max_seqlen_k, left, right, processors)
    packed = int(problem.cu_seqlens is not None)
    heads: int = _native.core().attention_backward_gradient_heads(q, k, problem.seed, packed, *sizes)
    return heads


def _run_backward(
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
    workspace, parts = _workspaces(q, k, problem, problem.sequences(q), with_sums=column_sums is not None)
    saved = (contiguous_rows(dout), q, k, v, _arguments(problem), out, lse)
    _native.core().attention_backward(*saved, *gradients, workspace, column_sums, parts)


def _workspaces(
    q: Tensor, k: Tensor | None, problem: AttentionProblem, sequences: int, *, with_sums: bool
) -> tuple[Tensor, Tensor | None]:
    """The backward's workspace, and that of its column sums."""
    core = _native.core()
    size = core.attention_backward_workspace(q, k, sequences, problem.max_seqlen, problem.max_seqlen_k)
    workspace = torch.empty(size, dtype=torch.float32, device=q.device)
    if not with_sums:
        return workspace, None
    count = core.attention_column_parts_cuda(q, k, sequences, problem.max_seqlen)
    return workspace, torch.empty(count, dtype=torch.float32, device=q.device)


def backward_fp8(
    dout: Tensor,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: AttentionProblem,
    cast: tuple[Tensor, Tensor, Tensor, Tensor, int],
    column_sums: Tensor | None,
) -> None:
    """Writes the gradient of packed qkv [T, 3, H, D] in FP8, and into ``column_sums`` its sums over all tokens.

    Args:
        cast: The scale, amax, rows [T, 3 H D], columns [3 H D, P], and 1 for e5m2, 0 for e4m3.
    """
    cu_seqlens = problem.cu_seqlens
    assert cu_seqlens is not None
    workspace, parts = _workspaces(qkv, None, problem, cu_seqlens.shape[0] - 1, with_sums=column_sums is not None)
    core, (_, _, rows, columns, _) = _native.core(), cast
    saved = (contiguous_rows(dout), qkv, _arguments(problem), out, lse)
    core.attention_backward_fp8_cuda(*saved, cast, workspace, column_sums, parts)
    core.fp8_transpose_cuda(rows, columns, cu_seqlens)  # of sequences that the kernel writes no columns of


def has_window(problem: AttentionProblem) -> bool:
    """Whether attention is neither full nor causal."""
    return problem.window_left != UNLIMITED or problem.window_right > 0


_COLUMN_PARTS_TOKENS = 64  # of a sequence: what it takes to sum columns would be a quarter of the gradients' bytes


def sums_columns(q: Tensor, problem: AttentionProblem) -> bool:
    """Whether CUDA's ``backward`` can give ``column_sums`` of gradients of q, k and v, and with gain.

    Each sequence has places of its own for them, so that there should not be many sequences of few tokens. With a
    window, several blocks process a head at the same time, and the sums would have no fixed order.
    """
    *tokens, _, head_dim = q.shape
    return (
        head_dim == 64 and not has_window(problem) and math.prod(tokens) >= _COLUMN_PARTS_TOKENS * problem.sequences(q)
    )


def _arguments(problem: AttentionProblem) -> tuple[Any, ...]:
    """The fields of AttentionProblem in csrc/attention.cpp."""
    cu_seqlens, cu_seqlens_k, lengths, lengths_k, _, _, seed, *numbers, p = problem
    threshold = philox.threshold(p)
    return (
        cu_seqlens,
        cu_seqlens if cu_seqlens_k is None else cu_seqlens_k,
        lengths,
        lengths if lengths_k is None else lengths_k,
        seed,
        *numbers,  # bounds, window and scale
        threshold,
        philox.scale(threshold),
    )


def _readable(x: Tensor | None) -> Any:
    """Kernels take any strides but the last, which is 1."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()
