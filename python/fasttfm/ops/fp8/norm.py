"""dropout_add_layer_norm whose result, or the gradient of whose branch, is cast to FP8 by its own kernel on Hopper."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.rows import empty_output, readable_rows
from fasttfm.ops import fp8
from fasttfm.ops.dropout_add_layer_norm import forward_op, stream_backward_cuda
from fasttfm.ops.fp8 import Quantized, Slot, native
from fasttfm.ops.layer_norm import one_type

_MAX_COLUMNS = 1024  # the kernel keeps a row in the registers of a warp


class NormArguments(NamedTuple):
    """The arguments of dropout_add_layer_norm's registered forward between the stream and ``want_z``."""

    weight: Tensor | None
    bias: Tensor | None
    linear_bias: Tensor | None
    cu_seqlens: Tensor | None
    seed: Tensor | None
    p: float
    eps: float


class NormGradients(NamedTuple):
    """The gradients of both terms of the sum, and of the parameters that are needed; the others are empty."""

    dresidual: Tensor
    dx8: Quantized
    dweight: Tensor
    dbias: Tensor
    dlinear_bias: Tensor


class Normalized(NamedTuple):
    y: Tensor
    z: Tensor
    statistics: Tensor
    y8: Quantized


def refuse(x: Tensor, residual: Tensor, slot: Slot, backend: str | None) -> str | None:
    """Why the forward's kernel does not support x [N, C]; None if it does."""
    return "takes e4m3" if slot.dtype != fp8.E4M3 else refuse_backward(x, residual, slot, backend)


def refuse_backward(x: Tensor, residual: Tensor, slot: Slot, backend: str | None) -> str | None:
    """Why the backward's kernel does not support the gradient of x [N, C]; None if it does."""
    if (reason := _native.missing_hopper()) is not None:
        return reason
    if backend not in (None, "cuda"):
        return f"another backend is requested: {backend}"
    if slot.measuring:
        return "takes a known scale"
    if x.dtype != torch.bfloat16 or residual.dtype not in (torch.bfloat16, torch.float32):
        return f"takes bfloat16, and a residual of bfloat16 or float32, got {x.dtype} and {residual.dtype}"
    if x.shape[1] > _MAX_COLUMNS:
        return f"takes up to {_MAX_COLUMNS} columns, got {x.shape[1]}"
    return native.refuse(x) or native.refuse(residual)


def add_norm_cast(
    x: Tensor,
    residual: Tensor,
    norm: NormArguments,
    slot: Slot,
    backend: str | None,
    *,
    want_y: bool = True,
    want_z: bool = True,
    with_columns: bool = True,
    forward: Any = forward_op,
) -> Normalized:
    """dropout_add_layer_norm of x [N, C], and its y in FP8: in both layouts, or only as rows. Without ``want_y``, the
    kernel does not write y, which is empty then. ``forward`` is the registered op, or its implementation, for what the
    kernel does not support."""
    if refuse(x, residual, slot, backend) is not None:
        y, z, statistics = forward(x, residual, *norm, want_z, backend)
        return Normalized(y, z, statistics, fp8.cast(y, slot, with_columns=with_columns))
    return _run_cuda(x, residual, norm, slot, want_y=want_y, want_z=want_z, with_columns=with_columns)


def _run_cuda(
    x: Tensor, residual: Tensor, norm: NormArguments, slot: Slot, *, want_y: bool, want_z: bool, with_columns: bool
) -> Normalized:
    x, residual = readable_rows(x), readable_rows(residual)
    count, width = x.shape
    y = torch.empty(count, width, dtype=x.dtype, device=x.device) if want_y else empty_output(x)
    z = torch.empty(count, width, dtype=residual.dtype, device=x.device) if want_z else empty_output(residual)
    statistics = torch.empty(2, count, dtype=torch.float32, device=x.device)
    rows, columns = fp8.empty_layouts(x, slot.dtype, with_columns=with_columns)
    parameters = one_type(x, norm.weight, norm.bias, norm.linear_bias, residual=residual)
    threshold = philox.threshold(norm.p)
    _native.core().dropout_add_layer_norm_fp8_cuda(
        *(x, residual, *parameters, norm.cu_seqlens, norm.seed, threshold, philox.scale(threshold), norm.eps),
        *(y if want_y else None, z if want_z else None, statistics),
        *(slot.scale, slot.amax, rows, columns if with_columns else None),
    )
    return Normalized(y, z, statistics, Quantized(rows, columns, slot.inverse))


def add_norm_backward_cast(
    gradients: tuple[Tensor, Tensor | None],
    z: Tensor,
    statistics: Tensor,
    norm: NormArguments,
    needed: list[bool],
    slot: Slot,
    backend: str | None,
) -> NormGradients | None:
    """The backward of dropout_add_layer_norm for the gradients of y and z, with dx only in FP8. It is the cast of
    dresidual after dropout: in the same kernel, or in another one if that one does not support the call. None if
    neither does."""
    dy, dz = gradients
    arguments = (dz, z, statistics, *norm[:-1], needed, backend)
    if refuse_backward(dy, z, slot, backend) is None:
        rows, columns = fp8.empty_layouts(dy, slot.dtype)
        cast = (slot.scale, slot.amax, rows, columns, int(slot.dtype == fp8.E5M2))
        if (result := stream_backward_cuda(dy, *arguments, cast=cast)) is not None:
            return NormGradients(result[0], Quantized(rows, columns, slot.inverse), *result[2:])
    cu_seqlens, seed = norm.cu_seqlens, norm.seed
    if cu_seqlens is None or seed is None or dy.dtype != z.dtype or not fp8.drops_in_cast(z, slot):
        return None
    if (result := stream_backward_cuda(dy, *arguments)) is None:
        return None
    return NormGradients(result[0], fp8.cast_dropped(result[0], slot, (cu_seqlens, seed, norm.p)), *result[2:])
