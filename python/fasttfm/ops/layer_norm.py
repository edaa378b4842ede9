"""``layer_norm``: LayerNorm over the last dimension, for any leading shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.launch import multiprocessors
from fasttfm.kernels.common.rows import as_rows
from fasttfm.kernels.layer_norm import reference
from fasttfm.ops import checks
from fasttfm.ops.backends import (
    Backend,
    BackendTable,
    always,
    refuse_cuda,
    refuse_native_cpu,
    refuse_triton,
    requested,
    triton_absent,
)
from fasttfm.ops.library import register

OP = "layer_norm"


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """Normalises each row of ``x`` to zero mean and unit variance, then scales and shifts it.

    Args:
        x: ``[..., C]``, fp32, bf16 or fp16 (fp64 on the reference backend). Rows may be strided; they are read in place.
        weight: ``[C]`` or None for 1. May be of another precision than ``x``: fp32 parameters with bf16 activations are usual.
        bias: ``[C]`` or None for 0.
        eps: Added to the variance.
        backend: Requests one backend; by default the first that can serve the call does.

    Returns:
        ``[..., C]`` in ``x``'s type, contiguous. Statistics are fp32 whatever the type, so autocast leaves the op alone.
    """
    _check(x, weight, bias, eps)
    TABLE.check_name(backend)
    y: Tensor = _LayerNorm.apply(x, weight, bias, float(eps), requested(backend))
    return y


def _check(x: Any, weight: Any, bias: Any, eps: Any) -> None:
    checks.check_floating(OP, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise checks.bad_value(OP, "x", "at least one dimension and one column", f"shape {tuple(x.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        checks.check_floating(OP, name, parameter, optional=True)
        checks.check_shape(OP, name, parameter, (x.shape[-1],))
        checks.check_device(OP, name, parameter, like=x)
    checks.check_double(OP, {"x": x, "weight": weight, "bias": bias})
    checks.check_number(OP, "eps", eps, low=0.0, high=float("inf"))


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str | None
    ) -> Tensor:
        y, mean, rstd = _forward_op(x, weight, bias, eps, backend)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.backend = backend
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        x, weight, mean, rstd = ctx.saved_tensors
        want_dweight = weight is not None and ctx.needs_input_grad[1]
        want_dbias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        dx, dweight, dbias = _backward_op(dy, x, weight, mean, rstd, want_dweight, want_dbias, ctx.backend)
        return (
            dx,
            dweight.to(weight.dtype) if want_dweight else None,
            dbias.to(ctx.bias_dtype) if want_dbias else None,
            None,
            None,
        )


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = TABLE.select(backend, x, weight, bias)
    outputs: tuple[Tensor, Tensor, Tensor] = chosen.functions["forward"](x, weight, bias, eps)
    return outputs


def _forward_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty(x.numel() // x.shape[-1], dtype=_statistics_dtype(x))
    return torch.empty_like(x, memory_format=torch.contiguous_format), statistics, torch.empty_like(statistics)


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    want_dweight: bool,
    want_dbias: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = TABLE.select(backend, x, weight, None)
    gradients: tuple[Tensor, Tensor, Tensor] = chosen.functions["backward"](
        dy, x, weight, mean, rstd, want_dweight, want_dbias
    )
    return gradients


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    want_dweight: bool,
    want_dbias: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _statistics_dtype(x)
    dweight = x.new_empty(x.shape[-1] if want_dweight else 0, dtype=dtype)
    dbias = x.new_empty(x.shape[-1] if want_dbias else 0, dtype=dtype)
    return torch.empty_like(x, memory_format=torch.contiguous_format), dweight, dbias


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


_forward_op = register(
    "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps, str? backend)"
    " -> (Tensor y, Tensor mean, Tensor rstd)",
    _forward,
    _forward_fake,
)
_backward_op = register(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, bool want_dweight, bool want_dbias,"
    " str? backend) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _backward,
    _backward_fake,
)


# ---- backends --------------------------------------------------------------------------------------------------------


def _forward_cpu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype)
    mean = torch.empty(rows.shape[0], dtype=torch.float32)
    rstd = torch.empty_like(mean)
    weight, bias = _as_float(weight), _as_float(bias)
    _native.core().layer_norm_forward_cpu(
        x=rows.data_ptr(),
        weight=_native.address(weight),
        bias=_native.address(bias),
        y=y.data_ptr(),
        mean=mean.data_ptr(),
        rstd=rstd.data_ptr(),
        rows=rows.shape[0],
        columns=rows.shape[1],
        x_stride=rows.stride(0),
        eps=eps,
        dtype=_native.DTYPE_CODES[x.dtype],
        threads=torch.get_num_threads(),
    )
    return y, mean, rstd


def _backward_cpu(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, want_dweight: bool, want_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    core = _native.core()
    rows, dy = as_rows(x), dy.contiguous()
    count, columns = rows.shape
    dx = torch.empty(x.shape, dtype=x.dtype)
    dweight = torch.empty(columns if want_dweight else 0, dtype=torch.float32)
    dbias = torch.empty(columns if want_dbias else 0, dtype=torch.float32)
    workspace = torch.empty(core.layer_norm_workspace(count, columns), dtype=torch.float32)
    weight = _as_float(weight)
    core.layer_norm_backward_cpu(
        dy=dy.data_ptr(),
        x=rows.data_ptr(),
        weight=_native.address(weight),
        mean=mean.data_ptr(),
        rstd=rstd.data_ptr(),
        dx=dx.data_ptr(),
        dweight=dweight.data_ptr() if want_dweight else 0,
        dbias=dbias.data_ptr() if want_dbias else 0,
        workspace=workspace.data_ptr(),
        rows=count,
        columns=columns,
        x_stride=rows.stride(0),
        dtype=_native.DTYPE_CODES[x.dtype],
        threads=torch.get_num_threads(),
    )
    return dx, dweight, dbias


def _as_float(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.float().contiguous()


def _forward_triton(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from fasttfm.kernels.layer_norm import triton

    outputs: tuple[Tensor, Tensor, Tensor] = triton.layer_norm_forward_triton(*args)
    return outputs


def _backward_triton(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from fasttfm.kernels.layer_norm import triton

    gradients: tuple[Tensor, Tensor, Tensor] = triton.layer_norm_backward_triton(*args)
    return gradients


def _forward_cuda(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    _native.core().layer_norm_forward_cuda(
        x=rows.data_ptr(),
        weight=_native.address(weight),
        bias=_native.address(bias),
        y=y.data_ptr(),
        mean=mean.data_ptr(),
        rstd=rstd.data_ptr(),
        rows=rows.shape[0],
        columns=rows.shape[1],
        x_stride=rows.stride(0),
        eps=eps,
        dtype=_native.DTYPE_CODES[x.dtype],
        weight_dtype=_native.dtype_code(weight),
        bias_dtype=_native.dtype_code(bias),
        device=x.device.index,
        stream=_native.stream(x),
    )
    return y, mean, rstd


def _backward_cuda(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, want_dweight: bool, want_dbias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, dy = as_rows(x), dy.contiguous()
    count, columns = rows.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight = torch.empty(columns if want_dweight else 0, dtype=torch.float32, device=x.device)
    dbias = torch.empty(columns if want_dbias else 0, dtype=torch.float32, device=x.device)
    blocks = _CUDA_BLOCKS_PER_MULTIPROCESSOR * multiprocessors(x)
    workspace = torch.empty(2 * blocks * columns, dtype=torch.float32, device=x.device)
    _native.core().layer_norm_backward_cuda(
        dy=dy.data_ptr(),
        x=rows.data_ptr(),
        weight=_native.address(weight),
        mean=mean.data_ptr(),
        rstd=rstd.data_ptr(),
        dx=dx.data_ptr(),
        dweight=dweight.data_ptr() if want_dweight else 0,
        dbias=dbias.data_ptr() if want_dbias else 0,
        workspace=workspace.data_ptr(),
        rows=count,
        columns=columns,
        x_stride=rows.stride(0),
        dtype=_native.DTYPE_CODES[x.dtype],
        weight_dtype=_native.dtype_code(weight),
        blocks=blocks,
        device=x.device.index,
        stream=_native.stream(x),
    )
    return dx, dweight, dbias


# Both kernels keep whole rows in registers; the CUDA ones read 8 elements, 16 bytes of a 16-bit type, at a time.
_GPU_MAX_COLUMNS = 8192
_CUDA_VECTOR = 8
_CUDA_BLOCKS_PER_MULTIPROCESSOR = 4


def _refuse_cuda(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> str | None:
    columns = x.shape[-1]
    if columns > _GPU_MAX_COLUMNS or columns % _CUDA_VECTOR:
        return f"takes a multiple of {_CUDA_VECTOR} columns, up to {_GPU_MAX_COLUMNS}, got {columns}"
    if any(tensor is not None and tensor.data_ptr() % 16 for tensor in (x, weight, bias)):
        return "takes tensors that start at a multiple of 16 bytes"
    if any(stride % _CUDA_VECTOR for stride in x.stride()[:-1]):
        return f"takes rows whose strides are multiples of {_CUDA_VECTOR}, got {x.stride()}"
    if any(parameter is not None and not parameter.is_contiguous() for parameter in (weight, bias)):
        return "takes contiguous weight and bias"
    return refuse_cuda(x)


def _refuse_triton(x: Tensor, *_: Any) -> str | None:
    if x.shape[-1] > _GPU_MAX_COLUMNS:
        return f"takes up to {_GPU_MAX_COLUMNS} columns, got {x.shape[-1]}"
    return refuse_triton(x)


# The CPU core stands before Triton so that Triton's interpreter serves a CPU tensor only when it is asked for by name.
TABLE = BackendTable(
    OP,
    (
        Backend(
            "cpu",
            _native.missing,
            lambda x, *_: refuse_native_cpu(x),
            {"forward": _forward_cpu, "backward": _backward_cpu},
        ),
        Backend("cuda", _native.missing_cuda, _refuse_cuda, {"forward": _forward_cuda, "backward": _backward_cuda}),
        Backend("triton", triton_absent, _refuse_triton, {"forward": _forward_triton, "backward": _backward_triton}),
        Backend(
            "reference",
            always,
            lambda *_: None,
            {"forward": reference.layer_norm_forward, "backward": reference.layer_norm_backward},
        ),
    ),
)
