"""The two products of a feed-forward block that meet its activation, with the activation behind them.

    forward    h = x weight^T     a = activation(h + bias)
    backward   da = dy weight     dh = da * activation'(h + bias)     dbias = sum over rows of dh     a once more

In 16-bit types on Hopper each is one kernel (kernels/gelu_product); otherwise the vendor's product and a pass of
bias_gelu follow one another. h and da are rounded to the storage type in between, either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.activation import CODES
from fasttfm.kernels.common.launch import is_hopper
from fasttfm.kernels.common.rows import as_rows, gradient_like
from fasttfm.ops import linear
from fasttfm.ops.backends import CUDA_VECTOR, dtype_name, refuse_cuda_rows
from fasttfm.ops.bias_gelu import backward_op as bias_gelu_backward_op
from fasttfm.ops.bias_gelu import forward_op as bias_gelu_forward_op
from fasttfm.ops.library import register


def refuse_cuda(x: Tensor, weight: Tensor, bias: Tensor | None = None, *others: Tensor | None) -> str | None:
    """Why Hopper's kernels cannot multiply x with the weight; ``others`` are tensors that they are to read as well."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {dtype_name(x.dtype)}"
    if not is_hopper(x.device):
        return "takes tensors on a GPU of compute capability 9.0"
    for size in weight.shape:  # x's columns are one of them
        if size % CUDA_VECTOR:
            return f"takes sizes that are multiples of {CUDA_VECTOR}, got {size}"
    return refuse_cuda_rows((x,), (weight, bias, *others))


def _is_fused(backend: str | None, x: Tensor, weight: Tensor, bias: Tensor | None, *others: Tensor) -> bool:
    """Whether the registered ops take Hopper's kernels: where bias_gelu's backend is free or CUDA's."""
    free = backend in (None, "cuda") and _native.missing_hopper() is None
    return free and refuse_cuda(x, weight, bias, *others) is None


# ---- the vendor's product and a pass ---------------------------------------------------------------------------------


def forward_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, keep: bool = True, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """a and, to ``keep``, h, both [..., I]."""
    h = linear.matmul(as_rows(x), weight.t(), shape=(*x.shape[:-1], weight.shape[0]))
    return bias_gelu_forward_op(h, bias, kind, backend), h if keep else linear.unwanted(x)


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
    """dh [..., I], dbias and a; what is not wanted is empty."""
    da = linear.matmul(as_rows(dy), weight, shape=h.shape)
    found: tuple[Tensor, Tensor, Tensor] = bias_gelu_backward_op(da, h, bias, kind, want_dbias, want_a, backend)
    return found


# ---- Hopper's kernels ------------------------------------------------------------------------------------------------


def forward_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, keep: bool = True) -> tuple[Tensor, Tensor]:
    """As ``forward_torch``."""
    rows = as_rows(x)
    shape = (*x.shape[:-1], weight.shape[0])
    a = torch.empty(shape, dtype=x.dtype, device=x.device)
    h = torch.empty(shape if keep else 0, dtype=x.dtype, device=x.device)
    _native.core().gelu_product_forward_cuda(
        x=rows.data_ptr(),
        weight=weight.data_ptr(),
        bias=_native.address(bias),
        h=h.data_ptr() if keep else 0,
        a=a.data_ptr(),
        rows=rows.shape[0],
        inputs=rows.shape[1],
        columns=weight.shape[0],
        x_stride=rows.stride(0),
        activation=CODES[kind],
        dtype=_native.DTYPE_CODES[x.dtype],
        bias_dtype=_native.dtype_code(bias),
        device=x.device.index,
        stream=_native.stream(x),
    )
    return a, h


def backward_cuda(
    dy: Tensor, weight: Tensor, h: Tensor, bias: Tensor | None, kind: str, want_dbias: bool, want_a: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``backward_torch``."""
    core = _native.core()
    rows = as_rows(dy)
    if refuse_cuda_rows((rows,)) is not None:
        rows = rows.clone(memory_format=torch.contiguous_format)
    columns = weight.shape[1]
    dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    a = torch.empty(h.shape if want_a else 0, dtype=h.dtype, device=h.device)
    dbias = gradient_like(bias, want_dbias, h)
    floats = core.gelu_product_workspace_cuda(rows.shape[0], columns) if want_dbias else 0
    workspace = torch.empty(floats, dtype=torch.float32, device=h.device)
    core.gelu_product_backward_cuda(
        dy=rows.data_ptr(),
        weight=weight.data_ptr(),
        bias=_native.address(bias),
        h=h.data_ptr(),
        dh=dh.data_ptr(),
        a=a.data_ptr() if want_a else 0,
        dbias=dbias.data_ptr() if want_dbias else 0,
        workspace=workspace.data_ptr(),
        rows=rows.shape[0],
        outputs=rows.shape[1],
        columns=columns,
        dy_stride=rows.stride(0),
        activation=CODES[kind],
        dtype=_native.DTYPE_CODES[h.dtype],
        bias_dtype=_native.dtype_code(bias),
        device=h.device.index,
        stream=_native.stream(h),
    )
    return dh, dbias, a


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, keep: bool, backend: str | None
) -> tuple[Tensor, Tensor]:
    if _is_fused(backend, x, weight, bias):
        return forward_cuda(x, weight, bias, kind, keep)
    return forward_torch(x, weight, bias, kind, keep, backend)


def _forward_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, keep: bool, backend: str | None
) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape if keep else 0)


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


def _backward_fake(
    dy: Tensor,
    weight: Tensor,
    h: Tensor,
    bias: Tensor | None,
    kind: str,
    want_dbias: bool,
    want_a: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return h.new_empty(h.shape), gradient_like(bias, want_dbias, h), h.new_empty(h.shape if want_a else 0)


forward_op = register(
    "gelu_product_forward(Tensor x, Tensor weight, Tensor? bias, str kind, bool keep, str? backend)"
    " -> (Tensor a, Tensor h)",
    _forward,
    _forward_fake,
)
backward_op = register(
    "gelu_product_backward(Tensor dy, Tensor weight, Tensor h, Tensor? bias, str kind, bool want_dbias, bool want_a,"
    " str? backend) -> (Tensor dh, Tensor dbias, Tensor a)",
    _backward,
    _backward_fake,
)
