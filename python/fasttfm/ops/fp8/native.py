"""Calls of Hopper's FP8 kernels (kernels/fp8/cuda.cu), with the arguments of kernels/fp8/reference.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.activation import CODES
from fasttfm.kernels.common.launch import is_hopper
from fasttfm.kernels.common.rows import gradient_like
from fasttfm.kernels.fp8.reference import ALIGNMENT, padded
from fasttfm.ops.core.backends import refuse_cuda, refuse_cuda_rows


def refuse(x: Tensor) -> str | None:
    """Why the kernels do not support x [N, C]; None if they do."""
    if (reason := refuse_cuda(x)) is not None:
        return reason
    if not is_hopper(x.device):
        return "takes tensors on a GPU of compute capability 9.0"
    if x.shape[-1] % ALIGNMENT:
        return f"takes a multiple of {ALIGNMENT} columns, got {x.shape[-1]}"
    return refuse_cuda_rows((x,))


def run(name: str, *arguments: Any) -> Any:
    kernels: dict[str, Any] = {"cast": _cast, "gelu_forward": _gelu_forward, "gelu_backward": _gelu_backward}
    return kernels[name](*arguments)


def _cast(x: Tensor, scale: Tensor, amax: Tensor, rows: Tensor, columns: Tensor) -> None:
    _native.core().fp8_cast_cuda(
        *(x, scale, amax, rows, columns, padded(x.shape[0]), _is_e5m2(rows.dtype)),
        *(None, None, 0, 1.0),
    )


def cast_dropped(
    x: Tensor, scale: Tensor, amax: Tensor, rows: Tensor, columns: Tensor, dropout: tuple[Tensor, Tensor, float]
) -> None:
    """Casts x to FP8 after dropout, which ``cu_seqlens``, seed and probability define."""
    cu_seqlens, seed, p = dropout
    threshold = philox.threshold(p)
    _native.core().fp8_cast_cuda(
        *(x, scale, amax, rows, columns, padded(x.shape[0]), _is_e5m2(rows.dtype)),
        *(seed, cu_seqlens, threshold, philox.scale(threshold)),
    )


def _is_e5m2(dtype: torch.dtype) -> bool:
    return dtype == torch.float8_e5m2


def _gelu_forward(h: Tensor, bias: Tensor | None, kind: str, scale: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
    rows = torch.empty(h.shape, dtype=dtype, device=h.device)
    _native.core().fp8_gelu_forward_cuda(h, bias, scale, amax, rows, _is_e5m2(dtype), CODES[kind])
    return rows


def _gelu_backward(
    da: Tensor,
    h: Tensor,
    bias: Tensor | None,
    kind: str,
    a_scale: Tensor,
    a_dtype: torch.dtype,
    scale: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    want_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    core = _native.core()
    outputs, sums = _empty_gradients(h, bias, dtype, a_dtype, core.fp8_gelu_workspace_cuda, want_dbias)
    core.fp8_gelu_backward_cuda(da, h, bias, a_scale, scale, amax, *outputs[:3], *sums, _is_e5m2(dtype), CODES[kind])
    return outputs


def _empty_gradients(
    h: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    a_dtype: torch.dtype,
    workspace_size: Callable[[int, int], int],
    want_dbias: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor]]:
    """What a backward of the activation writes, uninitialized: rows and columns of dh, columns of a, and the bias's
    gradient; and its arguments for the latter: None if there is none to write, and a workspace."""
    want_dbias = want_dbias and bias is not None
    count, width = h.shape
    rows = torch.empty(h.shape, dtype=dtype, device=h.device)
    columns, again = (torch.empty(width, padded(count), dtype=kind, device=h.device) for kind in (dtype, a_dtype))
    dbias = gradient_like(bias, want_dbias, h)
    floats = workspace_size(count, width) if want_dbias else 0
    workspace = torch.empty(floats, dtype=torch.float32, device=h.device)
    return (rows, columns, again, dbias), (dbias if want_dbias else None, workspace)


class CastTable:
    """The arguments of one launch that casts many fp32 matrices to e4m3 in both layouts.

    Args:
        casts: The arguments x, scale, amax, rows and columns of ``fp8_cast`` for each. The table stores their
            addresses.
    """

    def __init__(self, casts: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]) -> None:
        core, rows = _native.core(), []
        self.tiles = 0
        for tensors in casts:
            size = tensors[0].shape
            rows.append([self.tiles, *(t.data_ptr() for t in tensors), *size])  # Fp8CastRow in kernels/fp8/op.h
            self.tiles += core.fp8_cast_tiles_cuda(*size)
        self.addresses = [x.data_ptr() for x, *_ in casts]
        self.table = torch.tensor(rows, dtype=torch.int64, device=casts[0][0].device)

    @staticmethod
    def takes(x: Tensor) -> bool:
        """Whether the launch supports a matrix."""
        return x.dtype == torch.float32 and x.is_contiguous() and _native.missing_hopper() is None and refuse(x) is None

    def run(self) -> None:
        _native.core().fp8_cast_many_cuda(self.table, self.tiles, 0)


def refuse_gelu_gemm(x: Tensor, dtype: torch.dtype) -> str | None:
    """Why ``gelu_gemm`` does not support the FP8 rows x and activations of a dtype; None if it does."""
    if (reason := _native.missing_hopper()) is not None:
        return reason
    if dtype != torch.bfloat16:
        return f"takes bfloat16 activations, got {dtype}"
    return None if is_hopper(x.device) else "takes tensors on a GPU of compute capability 9.0"


def gelu_gemm(
    x: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    bias: Tensor | None,
    kind: str,
    scale: Tensor,
    amax: Tensor,
    *,
    keep_h: bool,
) -> tuple[Tensor | None, Tensor]:
    """The bf16 GEMM result ``h`` of x [N, K] and weight [C, K], each with its inverse scale, None unless it is kept,
    and the e4m3 rows of the activation of ``h + bias``. Updates ``amax``."""
    (left, left_inverse), (right, right_inverse) = x, weight
    rows, columns = left.shape[0], right.shape[0]
    a = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=left.device)
    h = torch.empty(rows, columns, dtype=torch.bfloat16, device=left.device) if keep_h else None
    _native.core().fp8_gelu_gemm_cuda(left, right, left_inverse, right_inverse, bias, scale, amax, h, a, CODES[kind])
    return h, a


def gelu_gemm_backward(
    dy: tuple[Tensor, Tensor],
    weight: tuple[Tensor, Tensor],
    h: Tensor,
    bias: Tensor | None,
    kind: str,
    a_scale: Tensor,
    scale: Tensor,
    amax: Tensor,
    *,
    want_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of ``fp8_gelu_backward`` for the GEMM result ``da`` of dy [N, K] and weight [C, K], each with its
    inverse scale. dh has the format of dy, and a is e4m3."""
    (left, left_inverse), (right, right_inverse) = dy, weight
    core = _native.core()
    workspace_size = core.fp8_gelu_gemm_workspace_cuda
    outputs, sums = _empty_gradients(h, bias, left.dtype, torch.float8_e4m3fn, workspace_size, want_dbias)
    core.fp8_gelu_gemm_backward_cuda(
        *(left, right, left_inverse, right_inverse, h, bias, a_scale, scale, amax, *outputs[:3]),
        *(*sums, _is_e5m2(left.dtype), CODES[kind]),
    )
    return outputs


_FORMATS = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}  # Fp8Format in kernels/gemm/op.h


def refuse_add_gemm(total: Tensor) -> str | None:
    """Why ``add_gemm`` does not support ``total``; None if it does."""
    if total.dtype == torch.float32:
        return "takes bfloat16 and float16, got float32"
    return refuse_cuda(total) or refuse_cuda_rows((total,))


def add_gemm(total: Tensor, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    """``total += a b^T`` in cuBLASLt's epilogue, of a [M, K] and b [N, K], each with its inverse scale."""
    return gemm(total, a, b, adds=True)


def gemm(
    d: Tensor,
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    bias: Tensor | None = None,
    *,
    adds: bool = False,
    fast: bool = False,
) -> Tensor:
    """``d = a b^T + bias`` or, if it ``adds``, ``d += a b^T``, by the native core. ``fast``: as in ``fp8.gemm``."""
    (left, left_scale), (right, right_scale) = a, b
    core = _native.core()
    workspace = torch.empty(core.gemm_workspace_bytes_cuda(), dtype=torch.int8, device=d.device)
    formats = (_FORMATS[left.dtype], _FORMATS[right.dtype])
    c = d if adds else None
    core.fp8_gemm_cuda(left, right, bias, c, d, workspace, *formats, left_scale, right_scale, fast)
    return d
