"""``gelu_layer_norm``: LayerNorm of GELU(x + linear_bias) in one pass, for any leading shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.activation import CODES
from fasttfm.kernels.common.launch import multiprocessors
from fasttfm.kernels.common.rows import as_rows, contiguous_like, contiguous_rows, gradient_like
from fasttfm.kernels.gelu_layer_norm import reference
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

OP = "gelu_layer_norm"

_KINDS = {"none": "gelu", "tanh": "gelu_tanh"}  # torch's names of the two forms -> kernels/common/activation.py
Parameter = Tensor | None


def gelu_layer_norm(
    x: Tensor,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    approximate: str = "none",
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """``layer_norm(gelu(x + linear_bias), weight, bias)``: the masked-LM transform of BERT, ALBERT and ELECTRA.

    ``x`` is what the transform's linear gives without its bias. Saved for the backward are ``x``, the parameters and
    two numbers per row; GELU is recomputed.

    Args:
        x: ``[..., C]``, fp32, bf16 or fp16 (fp64 on the reference backend). Strided rows are read in place.
        linear_bias: ``[C]`` or None for 0. Parameters may be of another precision than ``x``.
        weight: ``[C]`` or None for 1.
        bias: ``[C]`` or None for 0.
        approximate: ``none`` for GELU with erf, ``tanh`` for its tanh form, as in ``torch.nn.functional.gelu``.
        eps: Added to the variance.
        backend: Requests one backend; by default the first that can serve the call does.

    Returns:
        ``[..., C]`` in ``x``'s type, contiguous. Arithmetic is fp32 for all types, so autocast does not affect the op.
    """
    _check(x, {"linear_bias": linear_bias, "weight": weight, "bias": bias}, approximate, eps)
    TABLE.check_name(backend)
    arguments = (x, linear_bias, weight, bias, _KINDS[approximate], float(eps), requested(backend))
    if needs_gradient(x, linear_bias, weight, bias):
        y: Tensor = _GeluLayerNorm.apply(*arguments)
        return y
    y, _ = forward_op(*arguments)
    return y


def _check(x: Any, parameters: dict[str, Any], approximate: Any, eps: Any) -> None:
    checks.check_floating(OP, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise checks.bad_value(OP, "x", "at least one dimension and one column", f"shape {tuple(x.shape)}")
    for name, parameter in parameters.items():
        if parameter is not None:
            checks.check_floating(OP, name, parameter, optional=True)
            checks.check_shape(OP, name, parameter, (x.shape[-1],))
            checks.check_device(OP, name, parameter, like=x)
    checks.check_double(OP, x=x, **parameters)
    if not isinstance(approximate, str):
        raise checks.bad_type(OP, "approximate", "a name", type(approximate).__name__)
    if approximate not in _KINDS:
        raise checks.bad_value(OP, "approximate", f"one of {', '.join(_KINDS)}", repr(approximate))
    checks.check_number(OP, "eps", eps, low=0.0, high=float("inf"))


class _GeluLayerNorm(OpFunction):
    op = OP
    instead = "torch.nn.functional.gelu and layer_norm"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        linear_bias: Parameter,
        weight: Parameter,
        bias: Parameter,
        kind: str,
        eps: float,
        backend: str | None,
    ) -> Tensor:
        y: Tensor
        y, statistics = forward_op(x, linear_bias, weight, bias, kind, eps, backend)
        ctx.save_for_backward(x, linear_bias, weight, bias, statistics)
        ctx.kind, ctx.backend = kind, backend
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:4]
        dx, *gradients = backward_op(dy, *ctx.saved_tensors, ctx.kind, wanted, ctx.backend)
        kept = [gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)]
        return dx, *kept, None, None, None


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(
    x: Tensor,
    linear_bias: Parameter,
    weight: Parameter,
    bias: Parameter,
    kind: str,
    eps: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    chosen = TABLE.select(backend, x, linear_bias, weight, bias)
    outputs: tuple[Tensor, Tensor] = chosen.forward(x, linear_bias, weight, bias, kind, eps)
    return outputs


def _forward_fake(
    x: Tensor,
    linear_bias: Parameter,
    weight: Parameter,
    bias: Parameter,
    kind: str,
    eps: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape), x.new_empty((2, x.numel() // x.shape[-1]), dtype=dtype)


def _backward(
    dy: Tensor,
    x: Tensor,
    linear_bias: Parameter,
    weight: Parameter,
    bias: Parameter,
    statistics: Tensor,
    kind: str,
    wanted: Sequence[bool],
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chosen = TABLE.select(backend, x, linear_bias, weight, bias)
    gradients: tuple[Tensor, Tensor, Tensor, Tensor] = chosen.backward(
        dy, x, linear_bias, weight, bias, statistics, kind, wanted
    )
    return gradients


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    linear_bias: Parameter,
    weight: Parameter,
    bias: Parameter,
    statistics: Tensor,
    kind: str,
    wanted: Sequence[bool],
    backend: str | None,
) -> tuple[Tensor, ...]:
    parameters = zip((linear_bias, weight, bias), wanted, strict=True)
    return x.new_empty(x.shape), *(gradient_like(parameter, want, x) for parameter, want in parameters)


forward_op = register(
    "gelu_layer_norm_forward(Tensor x, Tensor? linear_bias, Tensor? weight, Tensor? bias, str kind, float eps,"
    " str? backend) -> (Tensor y, Tensor statistics)",
    _forward,
    _forward_fake,
)
backward_op = register(
    "gelu_layer_norm_backward(Tensor dy, Tensor x, Tensor? linear_bias, Tensor? weight, Tensor? bias,"
    " Tensor statistics, str kind, bool[] wanted, str? backend)"
    " -> (Tensor dx, Tensor dlinear_bias, Tensor dweight, Tensor dbias)",
    _backward,
    _backward_fake,
)


# ---- the native core: CPU and CUDA -----------------------------------------------------------------------------------


def _forward_native(
    x: Tensor, linear_bias: Parameter, weight: Parameter, bias: Parameter, kind: str, eps: float
) -> tuple[Tensor, Tensor]:
    core = _native.core()
    rows = as_rows(x)
    count, columns = rows.shape
    y = contiguous_like(x)
    statistics = torch.empty(2, count, dtype=torch.float32, device=x.device)
    linear_bias, weight, bias = _parameters(x, linear_bias, weight, bias)
    fields = {
        "x": rows.data_ptr(),
        "linear_bias": _native.address(linear_bias),
        "weight": _native.address(weight),
        "bias": _native.address(bias),
        "y": y.data_ptr(),
        "mean": statistics.data_ptr(),
        "rstd": statistics.data_ptr() + 4 * count,
        "rows": count,
        "columns": columns,
        "x_stride": rows.stride(0),
        "eps": eps,
        "activation": CODES[kind],
        "dtype": _native.DTYPE_CODES[x.dtype],
    }
    if x.is_cuda:
        given = next((parameter for parameter in (linear_bias, weight, bias) if parameter is not None), None)
        core.gelu_layer_norm_forward_cuda(
            **fields, parameter_dtype=_native.dtype_code(given), device=x.get_device(), stream=_native.stream(x)
        )
    else:
        workspace = torch.empty(core.gelu_layer_norm_forward_workspace(count, columns), dtype=torch.float32)
        core.gelu_layer_norm_forward_cpu(**fields, workspace=workspace.data_ptr(), threads=torch.get_num_threads())
    return y, statistics


def _backward_native(
    dy: Tensor,
    x: Tensor,
    linear_bias: Parameter,
    weight: Parameter,
    bias: Parameter,
    statistics: Tensor,
    kind: str,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    core = _native.core()
    rows, dy = as_rows(x), contiguous_rows(dy)
    count, columns = rows.shape
    dx = contiguous_like(x)
    parameters = (linear_bias, weight, bias)
    gradients = [gradient_like(parameter, want, x) for parameter, want in zip(parameters, wanted, strict=True)]
    # The CPU reads and sums in fp32 and leaves the rounding to torch.
    sums = gradients if x.is_cuda else [gradient.float() for gradient in gradients]
    read = parameters if x.is_cuda else _parameters(x, *parameters)
    blocks = multiprocessors(x) if x.is_cuda else 0
    elements = 3 * blocks * columns if x.is_cuda else core.gelu_layer_norm_backward_workspace(count, columns)
    workspace = torch.empty(elements, dtype=torch.float32, device=x.device)
    fields = {
        "dy": dy.data_ptr(),
        "x": rows.data_ptr(),
        "linear_bias": _native.address(read[0]),
        "weight": _native.address(read[1]),
        "mean": statistics.data_ptr(),
        "rstd": statistics.data_ptr() + 4 * count,
        "dx": dx.data_ptr(),
        "dlinear_bias": sums[0].data_ptr() if wanted[0] else 0,
        "dweight": sums[1].data_ptr() if wanted[1] else 0,
        "dbias": sums[2].data_ptr() if wanted[2] else 0,
        "workspace": workspace.data_ptr(),
        "rows": count,
        "columns": columns,
        "x_stride": rows.stride(0),
        "activation": CODES[kind],
        "dtype": _native.DTYPE_CODES[x.dtype],
    }
    if x.is_cuda:
        core.gelu_layer_norm_backward_cuda(
            **fields,
            linear_bias_dtype=_native.dtype_code(linear_bias),
            weight_dtype=_native.dtype_code(weight),
            bias_dtype=_native.dtype_code(bias),
            blocks=blocks,
            device=x.get_device(),
            stream=_native.stream(x),
            block_memory=_native.block_memory(x.get_device()),
        )
        return dx, gradients[0], gradients[1], gradients[2]
    core.gelu_layer_norm_backward_cpu(**fields, threads=torch.get_num_threads())
    rounded = [total.to(gradient.dtype) for total, gradient in zip(sums, gradients, strict=True)]
    return dx, rounded[0], rounded[1], rounded[2]


def _parameters(x: Tensor, *parameters: Parameter) -> list[Parameter]:
    """Contiguous parameters of one type: x's own where the kernels take that, else fp32."""
    of_x = all(parameter is None or parameter.dtype == x.dtype for parameter in parameters)
    dtype = x.dtype if x.is_cuda and of_x else torch.float32
    return [_native.as_parameter(parameter, dtype) for parameter in parameters]


# ---- backends --------------------------------------------------------------------------------------------------------


def _forward_triton(*args: Any) -> tuple[Tensor, Tensor]:
    from fasttfm.kernels.gelu_layer_norm import triton

    outputs: tuple[Tensor, Tensor] = triton.gelu_layer_norm_forward_triton(*args)
    return outputs


def _backward_triton(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from fasttfm.kernels.gelu_layer_norm import triton

    gradients: tuple[Tensor, Tensor, Tensor, Tensor] = triton.gelu_layer_norm_backward_triton(*args)
    return gradients


# Both GPU backends keep whole rows in registers; the CUDA kernels keep two, x and dy, in flight in shared memory.
_GPU_MAX_COLUMNS = 8192
_CUDA_MAX_ROW_BYTES = 16384


def _refuse_cuda(x: Tensor, *parameters: Parameter) -> str | None:
    most = _CUDA_MAX_ROW_BYTES // x.element_size()
    if x.shape[-1] > most:
        return f"takes up to {most} columns of this type, got {x.shape[-1]}"
    return refuse_cuda(x) or refuse_cuda_rows((x,), parameters) or _refuse_memory(x)


def _refuse_memory(x: Tensor) -> str | None:
    memory = _native.core().gelu_layer_norm_backward_memory_cuda
    return refuse_cuda_memory(x.get_device(), memory, x.shape[-1], _native.DTYPE_CODES[x.dtype])


def _refuse_triton(x: Tensor, *_: Any) -> str | None:
    if x.shape[-1] > _GPU_MAX_COLUMNS:
        return f"takes up to {_GPU_MAX_COLUMNS} columns, got {x.shape[-1]}"
    return refuse_triton(x)


# The CPU core comes before Triton, so that Triton's interpreter serves a CPU tensor only when it is requested by name.
TABLE = BackendTable(
    OP,
    (
        Backend("cpu", _native.missing, lambda x, *_: refuse_native_cpu(x), _forward_native, _backward_native),
        Backend("cuda", _native.missing_cuda, _refuse_cuda, _forward_native, _backward_native),
        Backend("triton", triton_absent, _refuse_triton, _forward_triton, _backward_triton),
        Backend(
            "reference",
            always,
            lambda *_: None,
            reference.gelu_layer_norm_forward,
            reference.gelu_layer_norm_backward,
        ),
    ),
)
