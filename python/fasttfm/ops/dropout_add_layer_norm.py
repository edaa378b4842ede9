"""``dropout_add_layer_norm``: dropout, residual addition and LayerNorm in one pass, for any leading shape."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common import philox
from fasttfm.kernels.common.rows import (
    contiguous_like,
    contiguous_rows,
    empty_numbers,
    empty_output,
    gradient_like,
    in_type,
    readable_rows,
    row_count,
)
from fasttfm.kernels.dropout_add_layer_norm import reference
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import (
    Gradient,
    Input,
    Output,
    boundaries,
    converted,
    number,
    parameter,
    row_statistics,
    rows,
    rows_like_first,
)
from fasttfm.ops.core.arguments import seed as seed_argument
from fasttfm.ops.core.backends import (
    dtype_name,
    native_cpu,
    native_cuda,
    refuse_columns,
    refuse_cuda_memory,
    torch_reference,
    triton_kernels,
)
from fasttfm.ops.core.declare import Op, Selected
from fasttfm.ops.core.library import OpFunction, is_plain, unshared
from fasttfm.ops.layer_norm import one_type

NAME = "dropout_add_layer_norm"
Outputs = tuple[Tensor, Tensor, Tensor]  # y, z, statistics
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # dresidual, dx, dweight, dbias, dlinear_bias


def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    linear_bias: Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
    prenorm: bool = False,
    cu_seqlens: Tensor | None = None,
    seed: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``z = residual + dropout(x + linear_bias)`` and ``y = LayerNorm(z) * weight + bias`` in one pass over memory.

    Args:
        x: ``[B, S, C]``, packed ``[T, C]`` or any ``[..., C]``: fp32, bf16 or fp16 (fp64 on the reference backend).
            Strided rows are read in place.
        residual: ``x``'s shape, in ``x``'s type or fp32. The sum ``z`` keeps its type.
        weight: ``[C]`` or None for 1. Parameters may differ from ``x`` in precision.
        bias: ``[C]`` or None for 0.
        linear_bias: ``[C]`` or None: the bias of the linear layer that computed ``x``, which is added here.
        p: Probability that dropout sets an element to zero, rounded to a multiple of 1/256; 0 in evaluation.
        eps: Added to the variance.
        prenorm: Whether to return ``(y, z)`` instead of ``y``, for pre-LN blocks, whose residual stream is ``z``.
        cu_seqlens: int32 ``[sequences + 1]``, the boundaries of packed sequences; ``x`` is then ``[T, C]``. With them a
            packed batch drops the same elements as the padded batch.
        seed: int64 ``[1]``, the seed of dropout; by default drawn from torch's generator.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        ``y`` in ``x``'s dtype, with ``prenorm`` also ``z`` in the residual's; contiguous. The dropout mask is not
        saved; the backward recomputes it from the seed.
    """
    p = _convert_p(NAME, p)
    if cu_seqlens is not None or (p == 0 and seed is not None):
        _check_dropout(x, cu_seqlens, seed)
    if p == 0:
        cu_seqlens = seed = None  # from here on, a seed means dropout
    elif seed is None and isinstance(x, Tensor):
        seed = philox.draw_seed(x.device)
    result: Tensor | tuple[Tensor, Tensor]
    result = OP(x, residual, weight, bias, linear_bias, cu_seqlens, seed, p, eps, bool(prenorm), backend=backend)
    return result


# ---- checks ----------------------------------------------------------------------------------------------------------

_CU_SEQLENS, _P = boundaries(), number("p", high=1.0)
_convert_p: Any = _P.convert


def _stream(name: str) -> Input:
    """The residual stream: rows like the first input's, in their type or fp32."""
    rows = rows_like_first(name)

    def check(op: str, tensor: Any, first: Any) -> None:
        rows.check(op, tensor, first)
        if tensor.dtype not in (first.dtype, torch.float32):
            expected = f"a tensor of x's {dtype_name(first.dtype)} or float32"
            raise checks.bad_type(op, name, expected, dtype_name(tensor.dtype))

    return replace(rows, check=check)


def _check_dropout(x: Any, cu_seqlens: Any, seed: Any) -> None:
    """Checks what a call without dropout does not pass on, and what calls of other shapes may have had in common."""
    checks.check_floating(NAME, "x", x)
    checks.check_seed(NAME, seed, like=x)
    if cu_seqlens is None:
        return
    _CU_SEQLENS.check(NAME, cu_seqlens, x)
    if x.dim() != 2:
        raise checks.bad_value(NAME, "x", "shape [T, C] next to cu_seqlens", f"shape {tuple(x.shape)}")
    if is_plain((cu_seqlens,)):  # otherwise the registered op looks at them
        checks.check_cu_seqlens_values(NAME, cu_seqlens, x.shape[0])


# ---- autograd --------------------------------------------------------------------------------------------------------


class _DropoutAddLayerNorm(OpFunction):
    """The graph needs z, which a call may return as well. Where the gradients of ``x`` and ``residual`` are equal, they
    are one tensor."""

    op = NAME
    instead = "torch.nn.functional.dropout and layer_norm"

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor | tuple[Tensor, Tensor]:
        prenorm, asked = arguments[9:]
        passed = arguments[:9]
        y: Tensor
        if isinstance(asked, Selected):
            (y, z, statistics), asked = asked.backend.forward(*passed, True), asked.requested
        else:
            y, z, statistics = OP.forward(*passed, True, asked)
        weight, bias, linear_bias, cu_seqlens, seed, p = arguments[2:8]
        if cu_seqlens is not None:
            (cu_seqlens,) = unshared(cu_seqlens)
        ctx.save_for_backward(z, statistics, weight, bias, linear_bias, cu_seqlens, seed)
        ctx.options = p, asked
        return (y, z) if prenorm else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dz: Tensor | None = None) -> tuple[Tensor | None, ...]:
        saved, (p, asked), needed = ctx.saved_tensors, ctx.options, ctx.needs_input_grad[2:5]
        dresidual, dx, *sums = OP.backward(dy, dz, *saved, p, list(needed), asked)
        if not _separate(dy, saved[0], saved[-1]):
            dx = dresidual
        parameters = [gradient if want else None for gradient, want in zip(sums, needed, strict=True)]
        return dx, dresidual, *parameters, None, None, None, None, None, None


def _separate(x: Tensor, residual: Tensor, seed: Tensor | None) -> bool:
    """Whether the gradients of ``x`` and ``residual`` differ; otherwise one tensor is returned for both."""
    return seed is not None or x.dtype != residual.dtype


# ---- the native core: CPU and CUDA -----------------------------------------------------------------------------------


def _forward(x: Tensor, *others: Any) -> Any:
    cu_seqlens = others[4]
    if cu_seqlens is not None:
        checks.check_cu_seqlens_values(NAME, cu_seqlens, x.shape[0])
    return OP.forward_by_backend(x, *others)


def _forward_native(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    linear_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    p: float,
    eps: float,
    want_z: bool,
    *,
    infer: bool = False,
) -> Any:
    """The outputs; with ``infer`` y, or y and z. Without ``want_z`` z is scratch memory of the CPU's kernel, which
    normalises in place: y, unless the sum is of another type."""
    y = contiguous_like(x)
    if want_z or (residual.dtype is not x.dtype and not x.is_cuda):
        z = contiguous_like(residual)
    else:
        z = None if x.is_cuda else y
    statistics = None if infer else empty_numbers(x, 2, row_count(x))
    threshold = philox.threshold(p)
    _native.core().dropout_add_layer_norm_forward(
        readable_rows(x),
        readable_rows(residual),
        *one_type(x, weight, bias, linear_bias, residual=residual),
        cu_seqlens,
        seed,
        threshold,
        philox.scale(threshold),
        eps,
        y,
        z,
        statistics,
    )
    if infer:
        return (y, z) if want_z else y
    return y, z if want_z else empty_output(residual), statistics


def _backward(dy: Tensor, dz: Tensor | None, *others: Any) -> Any:
    return OP.backward_by_backend(contiguous_rows(dy), None if dz is None else contiguous_rows(dz), *others)


def _backward_native(
    dy: Tensor,
    dz: Tensor | None,
    z: Tensor,
    statistics: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    linear_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    p: float,
    needed: list[bool],
    *,
    want_dx: bool = True,
    cast: tuple[Any, ...] = (),
) -> Gradients:
    core = _native.core()
    dresidual = contiguous_like(z)
    separate = want_dx and _separate(dy, z, seed)
    dx = contiguous_like(dy) if separate else empty_output(dy)
    parameters = (weight, bias, linear_bias)
    gradients = [gradient_like(parameter, want, dy) for parameter, want in zip(parameters, needed, strict=True)]
    # The CPU reads and sums in fp32 and leaves the rounding to torch.
    sums = gradients if z.is_cuda else [in_type(gradient, torch.float32) for gradient in gradients]
    read = weight if z.is_cuda else _native.as_parameter(weight, torch.float32)
    floats = core.dropout_add_layer_norm_backward_workspace(z)
    threshold = philox.threshold(p)
    launch = core.dropout_add_layer_norm_backward_fp8_cuda if cast else core.dropout_add_layer_norm_backward
    launch(
        dy,
        dz,
        z,
        statistics,
        read,
        cu_seqlens,
        seed,
        threshold,
        philox.scale(threshold),
        dresidual,
        dx if separate else None,
        *(total if want else None for total, want in zip(sums, needed, strict=True)),
        empty_numbers(z, floats),
        *([cast] if cast else []),
    )
    dweight, dbias, dlinear_bias = (in_type(total, like.dtype) for total, like in zip(sums, gradients, strict=True))
    return dresidual, dx, dweight, dbias, dlinear_bias


def stream_backward_cuda(dy: Tensor, *others: Any, cast: tuple[Any, ...] = ()) -> Gradients | None:
    """The backward without dx, which a caller computes from dresidual by the same seed: the arguments of the
    registered op. None if another backend runs the call. ``cast``: scale, amax, rows, columns and format of dx in FP8,
    for Hopper's kernel that writes them."""
    *passed, backend = others
    _, z, _, weight, bias, linear_bias = passed[:6]
    dy = contiguous_rows(dy)
    if OP.choose(backend, dy, z, weight, bias, linear_bias).name != "cuda":
        return None
    dz = None if passed[0] is None else contiguous_rows(passed[0])
    return _backward_native(dy, dz, *passed[1:], want_dx=False, cast=cast)


# ---- backends --------------------------------------------------------------------------------------------------------

_refuse_columns = refuse_columns(8192)  # both GPU backends keep whole rows in registers
_CUDA_MAX_ROWS = 2**30


def _refuse_size(x: Tensor, *_: Any) -> str | None:
    columns = x.shape[-1]
    if x.numel() > _CUDA_MAX_ROWS * columns:
        return f"takes at most {_CUDA_MAX_ROWS} rows, got {x.numel() // columns}"
    return _refuse_columns(x)


def _refuse_memory(x: Tensor, residual: Tensor | None = None, *parameters: Tensor | None) -> str | None:
    memory = _native.core().dropout_add_layer_norm_backward_memory_cuda
    codes = (_native.DTYPE_CODES[x.dtype], _native.DTYPE_CODES[x.dtype if residual is None else residual.dtype])
    has_linear_bias = any(parameter is not None for parameter in parameters[2:])
    return refuse_cuda_memory(x.get_device(), memory, x.shape[-1], *codes, int(has_linear_bias))


def _make_z(x: Tensor, residual: Tensor, *others: Any) -> Tensor:
    want_z = others[7]
    return residual.new_empty(x.shape if want_z else 0)


def _make_dx(dy: Tensor, dz: Tensor | None, z: Tensor, *others: Any) -> Tensor:
    seed = others[5]
    return dy.new_empty(z.shape if _separate(dy, z, seed) else 0)


PARAMETERS = ("weight", "bias", "linear_bias")
OP = Op(
    NAME,
    inputs=(rows("x"), _stream("residual"), *map(parameter, PARAMETERS), _CU_SEQLENS, seed_argument()),
    options=(converted("p", "float"), number("eps"), converted("want_z", "bool")),
    outputs=(Output("y", lambda x, *_: x.new_empty(x.shape)), Output("z", _make_z), row_statistics("statistics", 2)),
    saves=("z", "statistics", *PARAMETERS, "cu_seqlens", "seed"),
    backward_options=("p",),
    gradients=(Gradient("residual", lambda dy, dz, z, *_: z.new_empty(z.shape)), Gradient("x", _make_dx), *PARAMETERS),
    flag_list=True,
    chosen_by=("x", "residual", *PARAMETERS),
    backward_chosen_by=("dy", "z", *PARAMETERS),
    run_forward=_forward,
    run_backward=_backward,
    function=_DropoutAddLayerNorm,
    returned=("y", "z"),
    result=lambda outputs, arguments: outputs[:2] if arguments[9] else outputs[0],
    backends=(
        native_cpu(_forward_native, _backward_native, infer=functools.partial(_forward_native, infer=True)),
        native_cuda(
            _forward_native,
            _backward_native,
            rows=2,
            refuse=_refuse_size,
            refuse_on_gpu=_refuse_memory,
            infer=functools.partial(_forward_native, infer=True),
        ),
        triton_kernels(NAME, refuse=_refuse_columns),
        torch_reference(reference.dropout_add_layer_norm_forward, reference.dropout_add_layer_norm_backward),
    ),
)
forward_op, backward_op = OP.forward, OP.backward  # for composed ops
