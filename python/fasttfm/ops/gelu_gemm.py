"""The two GEMMs of a feed-forward block next to its activation, with the activation in their epilogues.

    forward    h = x weight^T     a = activation(h + bias)
    backward   da = dy weight     dh = da * activation'(h + bias)     dbias = sum over rows of dh     a once more

In 16-bit types on Hopper each is one kernel (kernels/gelu_gemm); otherwise a cuBLAS GEMM is followed by a pass of
bias_gelu. In both cases h and da are rounded to the storage type in between.

What the forward keeps for the backward is h (``PRODUCT``) or, where the caller keeps a too, the derivative
activation'(h + bias), rounded to the storage type (``DERIVATIVE``): Hopper's backward is then lighter by the special
functions and a tensor to write. A pass has nothing to gain from that: ``kept_beside`` says which it is to be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.activation import CODES
from fasttfm.kernels.common.launch import is_hopper
from fasttfm.kernels.common.rows import as_rows, gradient_like
from fasttfm.ops import linear
from fasttfm.ops.bias_gelu import backward_op as bias_gelu_backward_op
from fasttfm.ops.bias_gelu import forward_op as bias_gelu_forward_op
from fasttfm.ops.column_sum import column_sum_op
from fasttfm.ops.core.arguments import Output, checked, converted, flag
from fasttfm.ops.core.backends import CUDA_VECTOR, dtype_name, refuse_cuda_rows
from fasttfm.ops.core.declare import define

NOTHING, PRODUCT, DERIVATIVE = "nothing", "product", "derivative"  # what a forward keeps
_TYPES = (torch.bfloat16, torch.float16)


def refuse_cuda(x: Tensor, weight: Tensor, bias: Tensor | None = None, *others: Tensor | None) -> str | None:
    """Why Hopper's kernels cannot multiply x with the weight; ``others`` are tensors that they are to read as well."""
    if x.dtype not in _TYPES:
        return f"takes bfloat16 and float16, got {dtype_name(x.dtype)}"
    if not is_hopper(x.device):
        return "takes tensors on a GPU of compute capability 9.0"
    for size in weight.shape:  # x's columns are one of them
        if size % CUDA_VECTOR:
            return f"takes sizes that are multiples of {CUDA_VECTOR}, got {size}"
    return refuse_cuda_rows((x,), (weight, bias, *others))


def kept_beside(backend: str | None, x: Tensor, *weights: Tensor) -> str:
    """What the forward is to keep where its caller keeps the activation: the derivative where Hopper's kernels can be
    expected to run both directions, by type, sizes and device. The ops take either, whichever backend runs them."""
    whole = not any(size % CUDA_VECTOR for weight in weights for size in weight.shape)
    free = backend in (None, "cuda") and x.dtype in _TYPES and whole
    return DERIVATIVE if free and _has_kernels(x.device) else PRODUCT


def _has_kernels(device: torch.device) -> bool:
    return _native.missing_hopper() is None and is_hopper(device)


# What torch.compiler.assume_constant_result sets, which would import torch._dynamo: longer than all of fasttfm takes.
_has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_fused(backend: str | None, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Tensor) -> bool:
    """Whether the registered ops take Hopper's kernels: where bias_gelu's backend is free or CUDA's."""
    free = backend in (None, "cuda") and _native.missing_hopper() is None
    return free and refuse_cuda(x, weight, bias, *others) is None


# ---- a GEMM of torch and a pass --------------------------------------------------------------------------------------


def forward_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, kept: str = PRODUCT, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """a and what is kept, both [..., I]."""
    h = linear.matmul(as_rows(x), weight.t(), shape=(*x.shape[:-1], weight.shape[0]))
    a: Tensor = bias_gelu_forward_op(h, bias, kind, backend)
    if kept == DERIVATIVE:
        return a, bias_gelu_backward_op(torch.ones_like(h), h, bias, kind, False, False, backend)[0]
    return a, h if kept == PRODUCT else linear.empty_output(x)


def backward_torch(
    dy: Tensor,
    weight: Tensor,
    h: Tensor,
    bias: Tensor | None,
    kind: str,
    want_dbias: bool,
    want_a: bool,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dh [..., I], dbias and a; results that are not needed are empty."""
    da = linear.matmul(as_rows(dy), weight, shape=h.shape)
    results: tuple[Tensor, Tensor, Tensor] = bias_gelu_backward_op(da, h, bias, kind, want_dbias, want_a, backend)
    return results


def scaled_torch(
    dy: Tensor, weight: Tensor, derivative: Tensor, bias: Tensor | None, want_dbias: bool
) -> tuple[Tensor, Tensor]:
    """dh and dbias, out of the derivative."""
    dh = linear.matmul(as_rows(dy), weight, shape=derivative.shape).mul_(derivative)
    if bias is None or not want_dbias:
        return dh, linear.empty_output(dh)
    return dh, column_sum_op(as_rows(dh), bias.dtype, None)


# ---- Hopper's kernels ------------------------------------------------------------------------------------------------


def forward_cuda(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, kept: str = PRODUCT
) -> tuple[Tensor, Tensor]:
    """The results of ``forward_torch``."""
    rows = as_rows(x)
    shape = (*x.shape[:-1], weight.shape[0])
    a = torch.empty(shape, dtype=x.dtype, device=x.device)
    left = torch.empty(0 if kept == NOTHING else shape, dtype=x.dtype, device=x.device)
    h, derivative = left if kept == PRODUCT else None, left if kept == DERIVATIVE else None
    _native.core().gelu_gemm_forward_cuda(rows, weight, bias, h, derivative, a, CODES[kind])
    return a, left


def backward_cuda(
    dy: Tensor, weight: Tensor, h: Tensor, bias: Tensor | None, kind: str, want_dbias: bool, want_a: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of ``backward_torch``."""
    a = torch.empty(h.shape if want_a else 0, dtype=h.dtype, device=h.device)
    dh, dbias = _backward_cuda(dy, weight, h, PRODUCT, bias, kind, want_dbias, a)
    return dh, dbias, a


def scaled_cuda(
    dy: Tensor, weight: Tensor, derivative: Tensor, bias: Tensor | None, want_dbias: bool
) -> tuple[Tensor, Tensor]:
    """The results of ``scaled_torch``."""
    return _backward_cuda(dy, weight, derivative, DERIVATIVE, bias, "gelu", want_dbias, linear.empty_output(derivative))


def _backward_cuda(
    dy: Tensor,
    weight: Tensor,
    left: Tensor,
    kept: str,
    bias: Tensor | None,
    kind: str,
    want_dbias: bool,
    a: Tensor,
) -> tuple[Tensor, Tensor]:
    """dh and dbias, out of what the forward left; writes a, where it is not empty."""
    core = _native.core()
    rows = as_rows(dy)
    if refuse_cuda_rows((rows,)) is not None:
        rows = rows.clone(memory_format=torch.contiguous_format)
    columns = weight.shape[1]
    dh = torch.empty(left.shape, dtype=left.dtype, device=left.device)
    dbias = gradient_like(bias, want_dbias, left)
    floats = core.gelu_gemm_workspace_cuda(rows.shape[0], columns) if want_dbias else 0
    workspace = torch.empty(floats, dtype=torch.float32, device=left.device)
    read = (bias, left, None) if kept == PRODUCT else (None, None, left)
    core.gelu_gemm_backward_cuda(rows, weight, *read, dh, a, dbias if want_dbias else None, workspace, CODES[kind])
    return dh, dbias


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, kept: str, backend: str | None
) -> tuple[Tensor, Tensor]:
    if _is_fused(backend, x, weight, bias):
        return forward_cuda(x, weight, bias, kind, kept)
    return forward_torch(x, weight, bias, kind, kept, backend)


def _backward(
    dy: Tensor,
    weight: Tensor,
    h: Tensor,
    bias: Tensor | None,
    kind: str,
    want_dbias: bool,
    want_a: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if _is_fused(backend, dy, weight, bias, h):
        return backward_cuda(dy, weight, h, bias, kind, want_dbias, want_a)
    return backward_torch(dy, weight, h, bias, kind, want_dbias, want_a, backend)


def _scaled(
    dy: Tensor, weight: Tensor, derivative: Tensor, bias: Tensor | None, want_dbias: bool, backend: str | None
) -> tuple[Tensor, Tensor]:
    if _is_fused(backend, dy, weight, None, derivative):
        return scaled_cuda(dy, weight, derivative, bias, want_dbias)
    return scaled_torch(dy, weight, derivative, bias, want_dbias)


_DY, _WEIGHT, _BIAS = checked("dy"), checked("weight"), checked("bias", optional=True)
_KIND, _KEPT, _WANT_DBIAS = converted("kind", "str"), converted("kept", "str"), flag("want_dbias")

forward_op = define(
    "gelu_gemm_forward",
    (checked("x"), _WEIGHT, _BIAS, _KIND, _KEPT),
    (
        Output("a", linear.make_output),
        Output("left", lambda x, w, b, _, kept, *__: x.new_empty(0) if kept == NOTHING else linear.make_output(x, w)),
    ),
    _forward,
)
backward_op = define(
    "gelu_gemm_backward",
    (_DY, _WEIGHT, checked("h"), _BIAS, _KIND, _WANT_DBIAS, flag("want_a")),
    (
        Output("dh", lambda dy, weight, h, *_: h.new_empty(h.shape)),
        Output("dbias", lambda dy, weight, h, bias, _, want_dbias, *__: gradient_like(bias, want_dbias, h)),
        Output("a", lambda *passed: passed[2].new_empty(passed[2].shape if passed[6] else 0)),
    ),
    _backward,
)
scaled_op = define(
    "gelu_gemm_scaled",
    (_DY, _WEIGHT, checked("derivative"), _BIAS, _WANT_DBIAS),
    (
        Output("dh", lambda dy, weight, derivative, *_: derivative.new_empty(derivative.shape)),
        Output("dbias", lambda dy, weight, derivative, bias, want, _: gradient_like(bias, want, derivative)),
    ),
    _scaled,
)
