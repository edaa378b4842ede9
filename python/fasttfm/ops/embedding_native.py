"""``embedding`` by the native core: on CPUs, and on GPUs for batches of few tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.index_errors import IndexErrors
from fasttfm.kernels.common.rows import aligned, contiguous_rows, gradient_like
from fasttfm.kernels.embedding import reference
from fasttfm.ops.core.backends import dtype_name, refuse_cuda, refuse_cuda_rows

NAME = "embedding"
INDEX_ARGUMENTS = ("ids", "position_ids", "segment_ids")
errors = IndexErrors(NAME, INDEX_ARGUMENTS)


def _inputs(
    tables: reference.Triple,
    indices: reference.Triple,
    cu_seqlens: Tensor | None,
    weight: Tensor | None,
    seed: Tensor | None,
    statistics: Tensor,
    layer_norm: bool,
    p: float,
) -> tuple[Any, ...]:
    """The arguments that forward and backward share: INPUTS in csrc/embedding.cpp."""
    (ids, *others), threshold = indices, philox.threshold(p)
    tensors = (ids, *tables, *others, cu_seqlens, weight, seed, statistics)
    return (*tensors, layer_norm, threshold, philox.scale(threshold))


# ---- CPU -------------------------------------------------------------------------------------------------------------


def forward_cpu(
    tables: reference.Triple,
    indices: reference.Triple,
    cu_seqlens: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    layer_norm, eps, p, dtype = options
    tables, indices, cu_seqlens = _contiguous(tables, indices, cu_seqlens)
    weight, bias = _native.as_parameter(weight, torch.float32), _native.as_parameter(bias, torch.float32)
    count = indices[0].numel() if layer_norm else 0
    y = tables[0].new_empty((*indices[0].shape, tables[0].shape[1]), dtype=dtype)
    statistics = tables[0].new_empty((2, count), dtype=torch.float32)
    _native.core().embedding_forward_cpu(
        _inputs(tables, indices, cu_seqlens, weight, seed, statistics, layer_norm, p), bias, y, eps
    )
    return y, statistics


def backward_cpu(
    dy: Tensor,
    tables: reference.Triple,
    indices: reference.Triple,
    cu_seqlens: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    seed: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    layer_norm, p, padding_idx, needed = options
    core = _native.core()
    dy = dy.contiguous()
    tables, indices, cu_seqlens = _contiguous(tables, indices, cu_seqlens)
    fp32_weight = _native.as_parameter(weight, torch.float32)
    count, columns = indices[0].numel(), tables[0].shape[1]
    dx = dy.new_empty((count, columns), dtype=torch.float32)
    # The core sums in fp32 and leaves the rounding to torch.
    sums = [dy.new_empty(columns if need else 0, dtype=torch.float32) for need in needed[3:]]
    positions = dy.new_empty(count if needed[1] and indices[1] is None else 0, dtype=torch.int64)
    workspace = dy.new_empty(core.embedding_workspace_cpu(count, columns), dtype=torch.float32)
    core.embedding_backward_cpu(
        dy,
        _inputs(tables, indices, cu_seqlens, fp32_weight, seed, statistics, layer_norm, p),
        *(dx, positions, *sums, workspace),  # those without elements are not needed
    )
    ids, position_ids, segment_ids = indices
    used = (ids, positions if position_ids is None else position_ids, segment_ids)
    dtables = [
        _table_gradient(dx, table, rows, excluded) if need and table is not None else tables[0].new_empty(0)
        for table, rows, excluded, need in zip(tables, used, (padding_idx, None, None), needed[:3], strict=True)
    ]
    dweight, dbias = (
        total if parameter is None or not need else total.to(parameter.dtype)
        for total, parameter, need in zip(sums, (weight, bias), needed[3:], strict=True)
    )
    return (*dtables, dweight, dbias)


def _table_gradient(dx: Tensor, table: Tensor, indices: Tensor | None, excluded: int | None) -> Tensor:
    """The sum of dx [N, C] over the tokens of each row of ``table``; without indices all tokens belong to row 0."""
    count = len(dx)
    indices = dx.new_zeros(count, dtype=torch.int64) if indices is None else indices
    dtable = torch.empty_like(table, memory_format=torch.contiguous_format)
    first, following = (dx.new_empty(size, dtype=torch.int32) for size in (len(table), count))
    _native.core().embedding_table_backward_cpu(
        dx, indices, dtable, first, following, -1 if excluded is None else excluded
    )
    return dtable


def _contiguous(
    tables: reference.Triple, indices: reference.Triple, cu_seqlens: Tensor | None
) -> tuple[Any, Any, Tensor | None]:
    """Contiguous tables, int64 indices and int32 cu_seqlens, copied only if they are not already."""
    return (
        tuple(_native.as_parameter(table, tables[0].dtype) for table in tables),
        tuple(_native.as_parameter(tensor, torch.int64) for tensor in indices),
        _native.as_parameter(cu_seqlens, torch.int32),
    )


def refuse_types(word_table: Tensor, dtype: torch.dtype | None) -> str | None:
    """The native kernels are compiled for tables of the output's type, and for fp32 tables."""
    if dtype is None or word_table.dtype in (dtype, torch.float32):
        return None
    return f"takes tables in float32 or in the output's type, got {dtype_name(word_table.dtype)}"


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def refuse_gpu(
    ids: Tensor,
    word_table: Tensor,
    position_table: Tensor | None = None,
    segment_table: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> str | None:
    if (reason := refuse_cuda(word_table)) is not None:
        return reason
    core, tables = _native.core(), (word_table, position_table, segment_table)
    if word_table.shape[1] > core.embedding_gpu_columns:
        return f"takes up to {core.embedding_gpu_columns} columns, got {word_table.shape[1]}"
    if segment_table is not None and len(segment_table) > core.embedding_gpu_segments:
        return f"takes up to {core.embedding_gpu_segments} segments, got {len(segment_table)}"
    if (reason := refuse_types(word_table, dtype)) is not None:
        return reason
    if not all(table is None or table.is_contiguous() for table in tables):
        return "takes contiguous tables"
    return refuse_cuda_rows(tables)


def refuse_gpu_backward(ids: Tensor, *_: Any) -> str | None:
    most = _native.core().embedding_gpu_rows
    return f"takes up to {most} tokens, got {ids.numel()}" if ids.numel() > most else None


def _whole_vectors(parameter: Tensor | None) -> Tensor | None:
    """A contiguous parameter whose address is a multiple of 16 bytes, as the kernels load 16 bytes at a time."""
    return None if parameter is None else aligned(parameter.contiguous())


def forward_cuda(
    tables: reference.Triple,
    indices: reference.Triple,
    cu_seqlens: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    layer_norm, eps, p, dtype = options
    device, (tables, (ids, positions, segments), bounds) = tables[0].device, _contiguous(tables, indices, cu_seqlens)
    errors.raise_if_seen(device)
    y = torch.empty((*ids.shape, tables[0].shape[1]), dtype=dtype, device=device)
    statistics = torch.empty((2, ids.numel() if layer_norm else 0), dtype=torch.float32, device=device)
    inputs = (tables, (ids, positions, segments), bounds, _whole_vectors(weight), seed, statistics, layer_norm, p)
    _native.core().embedding_forward_cuda(_inputs(*inputs), _whole_vectors(bias), y, eps, errors.words(device))
    errors.watch(device)
    return y, statistics


def backward_cuda(
    dy: Tensor,
    tables: reference.Triple,
    indices: reference.Triple,
    cu_seqlens: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    seed: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    layer_norm, p, padding_idx, needed = options
    core, word_table = _native.core(), tables[0]
    tables, (ids, positions, segments), bounds = _contiguous(tables, indices, cu_seqlens)
    gradients = [
        gradient_like(parameter, need, word_table)
        for parameter, need in zip((*tables, weight, bias), needed, strict=True)
    ]
    written = [gradient if need else None for gradient, need in zip(gradients, needed, strict=True)]
    size = core.embedding_workspace_cuda(ids.numel(), word_table.shape[1])
    workspace = torch.empty(size, dtype=torch.float32, device=dy.device)
    inputs = (tables, (ids, positions, segments), bounds, _whole_vectors(weight), seed, statistics, layer_norm, p)
    core.embedding_backward_cuda(
        contiguous_rows(dy), _inputs(*inputs), *written, workspace, -1 if padding_idx is None else padding_idx
    )
    return tuple(gradients)
