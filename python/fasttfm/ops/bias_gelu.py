"""``bias_gelu``: an activation of x + bias, for any leading shape."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.bias_gelu import reference
from fasttfm.kernels.common.activation import CODES
from fasttfm.kernels.common.launch import multiprocessors
from fasttfm.kernels.common.rows import as_rows, contiguous_like, contiguous_rows, empty_output, gradient_like
from fasttfm.ops import checks
from fasttfm.ops.backends import (
    Backend,
    BackendTable,
    always,
    refuse_cuda,
    refuse_cuda_rows,
    refuse_native_cpu,
    refuse_triton,
    requested,
    triton_absent,
)
from fasttfm.ops.library import OpFunction, needs_gradient, register

OP = "bias_gelu"

# The names of activations in model configurations, and the formula of each (kernels/common/activation.py).
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_tanh": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
        "swish": "silu",
    }
)


def bias_gelu(x: Tensor, bias: Tensor | None = None, *, activation: str = "gelu", backend: str | None = None) -> Tensor:
    """Adds a bias to each row of ``x`` and applies an activation: what follows the first linear of an MLP.

    Only ``x`` and ``bias`` are saved for the backward; the activation is recomputed, and the bias gradient is computed
    in the same pass as that of ``x``.

    Args:
        x: ``[..., C]``, fp32, bf16 or fp16 (fp64 on the reference backend). Strided rows are read in place.
        bias: ``[C]`` or None for 0. May be of another precision than ``x``.
        activation: A name out of ``ACTIVATIONS``: ``gelu`` or ``gelu_python`` (with erf), ``gelu_new``, ``gelu_fast``,
            ``gelu_accurate``, ``gelu_pytorch_tanh`` or ``gelu_tanh`` (with tanh), ``relu``, ``silu`` or ``swish``.
        backend: Requests one backend; by default the first that can serve the call does.

    Returns:
        ``[..., C]`` in ``x``'s type, contiguous. Arithmetic is fp32 for all types, so autocast does not affect the op.
    """
    _check(x, bias, activation)
    TABLE.check_name(backend)
    arguments = (x, bias, ACTIVATIONS[activation], requested(backend))
    y: Tensor = _BiasGelu.apply(*arguments) if needs_gradient(x, bias) else forward_op(*arguments)
    return y


def _check(x: Any, bias: Any, activation: Any) -> None:
    checks.check_floating(OP, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise checks.bad_value(OP, "x", "at least one dimension and one column", f"shape {tuple(x.shape)}")
    if bias is not None:
        checks.check_floating(OP, "bias", bias, optional=True)
        checks.check_shape(OP, "bias", bias, (x.shape[-1],))
        checks.check_device(OP, "bias", bias, like=x)
    checks.check_double(OP, x=x, bias=bias)
    if not isinstance(activation, str):
        raise checks.bad_type(OP, "activation", "a name", type(activation).__name__)
    if activation not in ACTIVATIONS:
        raise checks.bad_value(OP, "activation", f"one of {', '.join(ACTIVATIONS)}", repr(activation))


class _BiasGelu(OpFunction):
    op = OP
    instead = "torch.nn.functional.gelu (relu, silu) of x + bias"

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kind: str, backend: str | None) -> Tensor:
        y: Tensor = forward_op(x, bias, kind, backend)
        ctx.save_for_backward(x, bias)
        ctx.kind, ctx.backend = kind, backend
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        want_dbias = ctx.needs_input_grad[1]
        dx, dbias, _ = backward_op(dy, x, bias, ctx.kind, want_dbias, False, ctx.backend)
        return dx, dbias if want_dbias else None, None, None


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(x: Tensor, bias: Tensor | None, kind: str, backend: str | None) -> Tensor:
    y: Tensor = TABLE.select(backend, x, bias).forward(x, bias, kind)
    return y


def _forward_fake(x: Tensor, bias: Tensor | None, kind: str, backend: str | None) -> Tensor:
    return x.new_empty(x.shape)


def _backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, want_dbias: bool, want_y: bool, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    table = TABLE.select(backend, x, bias)
    found: tuple[Tensor, Tensor, Tensor] = table.backward(dy, x, bias, kind, want_dbias, want_y)
    return found


def _backward_fake(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, want_dbias: bool, want_y: bool, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), gradient_like(bias, want_dbias, x), x.new_empty(x.shape if want_y else 0)


forward_op = register(
    "bias_gelu_forward(Tensor x, Tensor? bias, str kind, str? backend) -> Tensor",
    _forward,
    _forward_fake,
)
backward_op = register(
    "bias_gelu_backward(Tensor dy, Tensor x, Tensor? bias, str kind, bool want_dbias, bool want_y,"
    " str? backend) -> (Tensor dx, Tensor dbias, Tensor y)",
    _backward,
    _backward_fake,
)


# ---- the native core: CPU and CUDA -----------------------------------------------------------------------------------


def _forward_native(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    rows = as_rows(x)
    count, columns = rows.shape
    y = contiguous_like(x)
    bias = _parameter(x, bias)
    fields = {
        "x": rows.data_ptr(),
        "bias": _native.address(bias),
        "y": y.data_ptr(),
        "rows": count,
        "columns": columns,
        "x_stride": rows.stride(0),
        "activation": CODES[kind],
        "dtype": _native.DTYPE_CODES[x.dtype],
    }
    if x.is_cuda:
        _native.core().bias_gelu_forward_cuda(
            **fields, bias_dtype=_native.dtype_code(bias), device=x.get_device(), stream=_native.stream(x)
        )
    else:
        _native.core().bias_gelu_forward_cpu(**fields, threads=torch.get_num_threads())
    return y


def _backward_native(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, want_dbias: bool, want_y: bool
) -> tuple[Tensor, Tensor, Tensor]:
    core = _native.core()
    rows, dy = as_rows(x), contiguous_rows(dy)
    count, columns = rows.shape
    dx = contiguous_like(x)
    y = contiguous_like(x) if want_y else empty_output(x)
    dbias = gradient_like(bias, want_dbias, x)
    # The CPU reads and sums in fp32 and leaves the rounding to torch.
    sums = dbias if x.is_cuda else dbias.float()
    read = _parameter(x, bias)
    parts = _cuda_parts(x) if x.is_cuda else 0
    elements = parts * columns if x.is_cuda else core.bias_gelu_workspace(count, columns)
    workspace = torch.empty(elements if want_dbias else 0, dtype=torch.float32, device=x.device)
    fields = {
        "dy": dy.data_ptr(),
        "x": rows.data_ptr(),
        "bias": _native.address(read),
        "dx": dx.data_ptr(),
        "y": y.data_ptr() if want_y else 0,
        "dbias": sums.data_ptr() if want_dbias else 0,
        "workspace": workspace.data_ptr(),
        "rows": count,
        "columns": columns,
        "x_stride": rows.stride(0),
        "activation": CODES[kind],
        "dtype": _native.DTYPE_CODES[x.dtype],
    }
    if x.is_cuda:
        core.bias_gelu_backward_cuda(
            **fields,
            bias_dtype=_native.dtype_code(bias),
            parts=parts,
            device=x.get_device(),
            stream=_native.stream(x),
        )
        return dx, dbias, y
    core.bias_gelu_backward_cpu(**fields, threads=torch.get_num_threads())
    return dx, sums.to(dbias.dtype), y


def _parameter(x: Tensor, bias: Tensor | None) -> Tensor | None:
    """The bias as the kernels read it: on the CPU in fp32."""
    return bias if bias is None or x.is_cuda else _native.as_parameter(bias, torch.float32)


# Columns per warp in the CUDA kernels.
_CUDA_STRIPE = 256
_CUDA_BLOCKS_PER_MULTIPROCESSOR = 4


def _cuda_parts(x: Tensor) -> int:
    """Into how many shares the backward cuts the rows, so that its blocks fill the GPU once."""
    stripes = -(-x.shape[-1] // _CUDA_STRIPE)
    return max(1, _CUDA_BLOCKS_PER_MULTIPROCESSOR * multiprocessors(x) // stripes)


# ---- backends --------------------------------------------------------------------------------------------------------


def _forward_triton(*args: Any) -> Tensor:
    from fasttfm.kernels.bias_gelu import triton

    y: Tensor = triton.bias_gelu_forward_triton(*args)
    return y


def _backward_triton(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    from fasttfm.kernels.bias_gelu import triton

    found: tuple[Tensor, Tensor, Tensor] = triton.bias_gelu_backward_triton(*args)
    return found


def _refuse_cuda(x: Tensor, bias: Tensor | None = None) -> str | None:
    return refuse_cuda(x) or refuse_cuda_rows((x,), (bias,))


# The CPU core comes before Triton, so that Triton's interpreter serves a CPU tensor only when it is requested by name.
TABLE = BackendTable(
    OP,
    (
        Backend("cpu", _native.missing, lambda x, *_: refuse_native_cpu(x), _forward_native, _backward_native),
        Backend("cuda", _native.missing_cuda, _refuse_cuda, _forward_native, _backward_native),
        Backend("triton", triton_absent, lambda x, *_: refuse_triton(x), _forward_triton, _backward_triton),
        Backend("reference", always, lambda *_: None, reference.bias_gelu_forward, reference.bias_gelu_backward),
    ),
)
