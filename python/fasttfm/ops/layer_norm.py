"""``layer_norm``: LayerNorm over the last dimension, for any leading shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.launch import multiprocessors
from fasttfm.kernels.common.rows import as_rows, contiguous_like, contiguous_rows, gradient_like
from fasttfm.kernels.layer_norm import reference
from fasttfm.ops import checks
from fasttfm.ops.backends import (
    Backend,
    BackendTable,
    always,
    refuse_cuda,
    refuse_cuda_memory,
    refuse_cuda_rows,
    refuse_native_cpu,
    refuse_triton,
    requested,
    triton_absent,
)
from fasttfm.ops.library import OpFunction, needs_gradient, register

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
        x: ``[..., C]``, fp32, bf16 or fp16 (fp64 on the reference backend). Strided rows are read in place.
        weight: ``[C]`` or None for 1. May differ from ``x`` in precision: fp32 next to bf16 activations is usual.
        bias: ``[C]`` or None for 0.
        eps: Added to the variance.
        backend: Requests one backend; by default the first that can serve the call does.

    Returns:
        ``[..., C]`` in ``x``'s type, contiguous. Statistics are fp32 in any case, so autocast leaves the op alone.
    """
    _check(x, weight, bias, eps)
    TABLE.check_name(backend)
    arguments = (x, weight, bias, float(eps), requested(backend))
    y: Tensor = _LayerNorm.apply(*arguments) if needs_gradient(x, weight, bias) else forward_op(*arguments)[0]
    return y


def _check(x: Any, weight: Any, bias: Any, eps: Any) -> None:
    checks.check_floating(OP, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise checks.bad_value(OP, "x", "at least one dimension and one column", f"shape {tuple(x.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            checks.check_floating(OP, name, parameter, optional=True)
            checks.check_shape(OP, name, parameter, (x.shape[-1],))
            checks.check_device(OP, name, parameter, like=x)
    checks.check_double(OP, x=x, weight=weight, bias=bias)
    checks.check_number(OP, "eps", eps, low=0.0, high=float("inf"))


class _LayerNorm(OpFunction):
    op = OP
    instead = "torch.nn.functional.layer_norm"

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str | None
    ) -> Tensor:
        y: Tensor
        y, statistics = forward_op(x, weight, bias, eps, backend)
        ctx.save_for_backward(x, weight, bias, statistics)
        ctx.backend = backend
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics = ctx.saved_tensors
        _, want_dweight, want_dbias, *_ = ctx.needs_input_grad
        dx, dweight, dbias = backward_op(dy, x, weight, bias, statistics, want_dweight, want_dbias, ctx.backend)
        return dx, dweight if want_dweight else None, dbias if want_dbias else None, None, None


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str | None
) -> tuple[Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor] = TABLE.select(backend, x, weight, bias).forward(x, weight, bias, eps)
    return outputs


def _forward_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, backend: str | None
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape), x.new_empty((2, x.numel() // x.shape[-1]), dtype=dtype)


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    want_dweight: bool,
    want_dbias: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = TABLE.select(backend, x, weight, bias).backward(
        dy, x, weight, bias, statistics, want_dweight, want_dbias
    )
    return gradients


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    want_dweight: bool,
    want_dbias: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), gradient_like(weight, want_dweight, x), gradient_like(bias, want_dbias, x)


forward_op = register(
    "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps, str? backend)"
    " -> (Tensor y, Tensor statistics)",
    _forward,
    _forward_fake,
)
backward_op = register(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor statistics, bool want_dweight,"
    " bool want_dbias, str? backend) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _backward,
    _backward_fake,
)


# ---- the native core: CPU and CUDA -----------------------------------------------------------------------------------


def _forward_native(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    rows = as_rows(x)
    count, columns = rows.shape
    y = contiguous_like(x)
    statistics = torch.empty(2, count, dtype=torch.float32, device=x.device)
    weight, bias = _parameters(x, weight, bias)
    fields = {
        "x": rows.data_ptr(),
        "weight": _native.address(weight),
        "bias": _native.address(bias),
        "y": y.data_ptr(),
        "mean": statistics.data_ptr(),
        "rstd": statistics.data_ptr() + 4 * count,
        "rows": count,
        "columns": columns,
        "x_stride": rows.stride(0),
        "eps": eps,
        "dtype": _native.DTYPE_CODES[x.dtype],
    }
    if x.is_cuda:
        parameter = bias if weight is None else weight
        _native.core().layer_norm_forward_cuda(
            **fields,
            parameter_dtype=_native.dtype_code(parameter),
            device=x.get_device(),
            stream=_native.stream(x),
        )
    else:
        _native.core().layer_norm_forward_cpu(**fields, threads=torch.get_num_threads())
    return y, statistics


def _backward_native(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    want_dweight: bool,
    want_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    core = _native.core()
    rows, dy = as_rows(x), contiguous_rows(dy)
    count, columns = rows.shape
    fp32_weight, _ = (weight, bias) if x.is_cuda else _parameters(x, weight, bias)
    dx = contiguous_like(x)
    dweight = gradient_like(weight, want_dweight, x)
    dbias = gradient_like(bias, want_dbias, x)
    # The CPU sums in fp32 and leaves the rounding to torch.
    sums = (dweight, dbias) if x.is_cuda else (dweight.float(), dbias.float())
    blocks = multiprocessors(x) if x.is_cuda else 0
    elements = 2 * blocks * columns if x.is_cuda else core.layer_norm_workspace(count, columns)
    workspace = torch.empty(elements, dtype=torch.float32, device=x.device)
    fields = {
        "dy": dy.data_ptr(),
        "x": rows.data_ptr(),
        "weight": _native.address(fp32_weight),
        "mean": statistics.data_ptr(),
        "rstd": statistics.data_ptr() + 4 * count,
        "dx": dx.data_ptr(),
        "dweight": sums[0].data_ptr() if want_dweight else 0,
        "dbias": sums[1].data_ptr() if want_dbias else 0,
        "workspace": workspace.data_ptr(),
        "rows": count,
        "columns": columns,
        "x_stride": rows.stride(0),
        "dtype": _native.DTYPE_CODES[x.dtype],
    }
    if x.is_cuda:
        core.layer_norm_backward_cuda(
            **fields,
            weight_dtype=_native.dtype_code(weight),
            bias_dtype=_native.dtype_code(bias),
            blocks=blocks,
            device=x.get_device(),
            stream=_native.stream(x),
            block_memory=_native.block_memory(x.get_device()),
        )
        return dx, dweight, dbias
    core.layer_norm_backward_cpu(**fields, threads=torch.get_num_threads())
    return dx, sums[0].to(dweight.dtype), sums[1].to(dbias.dtype)


def _parameters(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Contiguous parameters of one type: x's own where the kernels take that, else fp32."""
    given = [parameter for parameter in (weight, bias) if parameter is not None]
    dtype = x.dtype if x.is_cuda and all(parameter.dtype == x.dtype for parameter in given) else torch.float32
    return _native.as_parameter(weight, dtype), _native.as_parameter(bias, dtype)


# ---- backends --------------------------------------------------------------------------------------------------------


def _forward_triton(*args: Any) -> tuple[Tensor, Tensor]:
    from fasttfm.kernels.layer_norm import triton

    outputs: tuple[Tensor, Tensor] = triton.layer_norm_forward_triton(*args)
    return outputs


def _backward_triton(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from fasttfm.kernels.layer_norm import triton

    gradients: tuple[Tensor, Tensor, Tensor] = triton.layer_norm_backward_triton(*args)
    return gradients


# Both GPU backends keep whole rows in registers.
_GPU_MAX_COLUMNS = 8192


def _refuse_cuda(x: Tensor, *parameters: Tensor | None) -> str | None:
    if x.shape[-1] > _GPU_MAX_COLUMNS:
        return f"takes up to {_GPU_MAX_COLUMNS} columns, got {x.shape[-1]}"
    return refuse_cuda(x) or refuse_cuda_rows((x,), parameters) or _refuse_memory(x)


def _refuse_memory(x: Tensor) -> str | None:
    memory = _native.core().layer_norm_backward_memory_cuda
    return refuse_cuda_memory(x.get_device(), memory, x.shape[-1], _native.DTYPE_CODES[x.dtype])


def _refuse_triton(x: Tensor, *_: Any) -> str | None:
    if x.shape[-1] > _GPU_MAX_COLUMNS:
        return f"takes up to {_GPU_MAX_COLUMNS} columns, got {x.shape[-1]}"
    return refuse_triton(x)


# The CPU core stands before Triton: Triton's interpreter serves a CPU tensor only when it is asked for by name.
TABLE = BackendTable(
    OP,
    (
        Backend("cpu", _native.missing, lambda x, *_: refuse_native_cpu(x), _forward_native, _backward_native),
        Backend("cuda", _native.missing_cuda, _refuse_cuda, _forward_native, _backward_native),
        Backend("triton", triton_absent, _refuse_triton, _forward_triton, _backward_triton),
        Backend("reference", always, lambda *_: None, reference.layer_norm_forward, reference.layer_norm_backward),
    ),
)
