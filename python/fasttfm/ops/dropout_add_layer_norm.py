"""``dropout_add_layer_norm``: dropout, residual addition and LayerNorm in one pass, for any leading shape."""

from __future__ import annotations

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
from fasttfm.ops import checks
from fasttfm.ops.backends import (
    Backend,
    BackendTable,
    dtype_name,
    native_cpu,
    native_cuda,
    refuse_columns,
    refuse_cuda_memory,
    requested,
    torch_reference,
    triton_kernels,
)
from fasttfm.ops.declare import KnownCalls, Selected, check_inputs, number, parameter, rows, rows_like_first
from fasttfm.ops.library import OpFunction, any_requires_grad, is_plain, needs_gradient, register, unshared

OP = "dropout_add_layer_norm"


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
    asked = requested(backend)
    key = CALLS.key("rlpppcs", x, residual, weight, bias, linear_bias, cu_seqlens, seed)
    selected = CALLS.find(key, asked)
    if selected is None or cu_seqlens is not None:
        _check(x, residual, weight, bias, linear_bias)
    p, eps = _P.convert(OP, p), _EPS.convert(OP, eps)
    if selected is None or cu_seqlens is not None:
        _check_dropout(x, p, cu_seqlens, seed)
        TABLE.check_name(backend)
    if p == 0:
        cu_seqlens = seed = None  # from here on, a seed means dropout
    elif seed is None:
        seed = philox.draw_seed(x.device)
    tensors = (x, residual, weight, bias, linear_bias, cu_seqlens, seed)
    if selected is None and key is not None:
        selected = CALLS.add(key, asked, TABLE.select(asked, *tensors[:5]))
    result: Tensor | tuple[Tensor, Tensor]
    if selected is None and needs_gradient(*tensors[:5]):
        result = _DropoutAddLayerNorm.apply(*tensors, p, eps, bool(prenorm), asked)
        return result
    if selected is not None and torch.is_grad_enabled() and any_requires_grad(*tensors[:5]):
        result = _DropoutAddLayerNorm.apply_plain(*tensors, p, eps, bool(prenorm), selected)
        return result
    if selected is None:
        y, z, _ = forward_op(*tensors, p, eps, bool(prenorm), asked)
    else:
        y, z, _ = _run_forward(selected.backend, *tensors, p, eps, bool(prenorm))
    return (y, z) if prenorm else y


def _check(*tensors: Any) -> None:
    check_inputs(OP, _INPUTS, tensors)
    x, residual = tensors[:2]
    if residual.dtype not in (x.dtype, torch.float32):
        expected = f"a tensor of x's {dtype_name(x.dtype)} or float32"
        raise checks.bad_type(OP, "residual", expected, dtype_name(residual.dtype))


def _check_dropout(x: Tensor, p: float, cu_seqlens: Any, seed: Any) -> None:
    checks.check_seed(OP, seed, like=x)
    if cu_seqlens is None:
        return
    checks.check_cu_seqlens(OP, cu_seqlens, like=x)
    if x.dim() != 2:
        raise checks.bad_value(OP, "x", "shape [T, C] next to cu_seqlens", f"shape {tuple(x.shape)}")
    if len(cu_seqlens) < 2 or not cu_seqlens.is_contiguous():
        got = f"shape {tuple(cu_seqlens.shape)} with strides {cu_seqlens.stride()}"
        raise checks.bad_value(OP, "cu_seqlens", "a contiguous [sequences + 1], at least one sequence", got)
    if p == 0 and is_plain((cu_seqlens,)):  # otherwise the registered op looks at them
        checks.check_cu_seqlens_values(OP, cu_seqlens, x.shape[0])


class _DropoutAddLayerNorm(OpFunction):
    op = OP
    instead = "torch.nn.functional.dropout and layer_norm"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        linear_bias: Tensor | None,
        cu_seqlens: Tensor | None,
        seed: Tensor | None,
        p: float,
        eps: float,
        prenorm: bool,
        backend: Selected | str | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        given = (x, residual, weight, bias, linear_bias, cu_seqlens, seed, p, eps, True)
        y: Tensor
        if isinstance(backend, Selected):
            (y, z, statistics), backend = _run_forward(backend.backend, *given), backend.requested
        else:
            y, z, statistics = forward_op(*given, backend)
        ctx.save_for_backward(z, statistics, weight, bias, linear_bias, *unshared(cu_seqlens), seed)
        ctx.p = p
        ctx.backend = backend
        return (y, z) if prenorm else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dz: Tensor | None = None) -> tuple[Tensor | None, ...]:
        z, statistics, *others = ctx.saved_tensors
        _, _, *wanted = ctx.needs_input_grad[:5]
        dresidual, dx, *sums = backward_op(dy, dz, z, statistics, *others, ctx.p, wanted, ctx.backend)
        if not _separate(dy, z, others[-1]):
            dx = dresidual
        parameters = [gradient if want else None for gradient, want in zip(sums, wanted, strict=True)]
        return dx, dresidual, *parameters, None, None, None, None, None, None


def _separate(x: Tensor, residual: Tensor, seed: Tensor | None) -> bool:
    """Whether the gradients of ``x`` and ``residual`` differ; otherwise one tensor is returned for both."""
    return seed is not None or x.dtype != residual.dtype


# ---- torch.library ---------------------------------------------------------------------------------------------------

Outputs = tuple[Tensor, Tensor, Tensor]  # y, z, statistics
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # dresidual, dx, dweight, dbias, dlinear_bias


def _forward(*arguments: Any) -> Outputs:
    *given, asked = arguments
    return _run_forward(_choose(asked, *given[:5]), *given)


def _run_forward(chosen: Backend, x: Tensor, *others: Any) -> Outputs:
    cu_seqlens = others[4]
    if cu_seqlens is not None:
        checks.check_cu_seqlens_values(OP, cu_seqlens, x.shape[0])
    outputs: Outputs = chosen.forward(x, *others)
    return outputs


def _choose(asked: str | None, *tensors: Tensor | None) -> Backend:
    selected = CALLS.find(CALLS.key("rlpppcs", *tensors, None, None), asked)
    return TABLE.select(asked, *tensors) if selected is None else selected.backend


def _forward_fake(x: Tensor, residual: Tensor, *others: Any) -> Outputs:
    *_, want_z, _ = others
    statistics = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        x.new_empty(x.shape),
        residual.new_empty(x.shape if want_z else 0),
        x.new_empty((2, x.numel() // x.shape[-1]), dtype=statistics),
    )


def _backward(
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
    wanted: list[bool],
    backend: str | None,
) -> Gradients:
    dy = contiguous_rows(dy)
    dz = None if dz is None else contiguous_rows(dz)
    chosen = _choose(backend, dy, z, weight, bias, linear_bias)
    gradients: Gradients = chosen.backward(
        dy, dz, z, statistics, weight, bias, linear_bias, cu_seqlens, seed, p, wanted
    )
    return gradients


def _backward_fake(
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
    wanted: list[bool],
    backend: str | None,
) -> Gradients:
    return (
        z.new_empty(z.shape),
        dy.new_empty(z.shape if _separate(dy, z, seed) else 0),
        gradient_like(weight, wanted[0], dy),
        gradient_like(bias, wanted[1], dy),
        gradient_like(linear_bias, wanted[2], dy),
    )


forward_op = register(
    "dropout_add_layer_norm_forward(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? linear_bias,"
    " Tensor? cu_seqlens, Tensor? seed, float p, float eps, bool want_z, str? backend)"
    " -> (Tensor y, Tensor z, Tensor statistics)",
    _forward,
    _forward_fake,
)
backward_op = register(
    "dropout_add_layer_norm_backward(Tensor dy, Tensor? dz, Tensor z, Tensor statistics, Tensor? weight, Tensor? bias,"
    " Tensor? linear_bias, Tensor? cu_seqlens, Tensor? seed, float p, bool[] wanted, str? backend)"
    " -> (Tensor dresidual, Tensor dx, Tensor dweight, Tensor dbias, Tensor dlinear_bias)",
    _backward,
    _backward_fake,
)


# ---- the native core: CPU and CUDA -----------------------------------------------------------------------------------


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
) -> Outputs:
    y = contiguous_like(x)
    statistics = empty_numbers(x, 2, row_count(x))
    z = contiguous_like(residual) if want_z else empty_output(residual)
    scratch: Tensor | None = z if want_z else None
    if not want_z and not x.is_cuda:  # the CPU normalises in place; a sum of another type needs room of its own
        scratch = y if residual.dtype == x.dtype else contiguous_like(residual)
    threshold = philox.threshold(p)
    _native.core().dropout_add_layer_norm_forward(
        readable_rows(x),
        readable_rows(residual),
        *one_type(x, residual, weight, bias, linear_bias),
        cu_seqlens,
        seed,
        threshold,
        philox.scale(threshold),
        eps,
        y,
        scratch,
        statistics,
    )
    return y, z, statistics


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
    wanted: list[bool],
    *,
    want_dx: bool = True,
    cast: tuple[Any, ...] = (),
) -> Gradients:
    core = _native.core()
    dresidual = contiguous_like(z)
    separate = want_dx and _separate(dy, z, seed)
    dx = contiguous_like(dy) if separate else empty_output(dy)
    parameters = (weight, bias, linear_bias)
    gradients = [gradient_like(parameter, want, dy) for parameter, want in zip(parameters, wanted, strict=True)]
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
        *(total if want else None for total, want in zip(sums, wanted, strict=True)),
        empty_numbers(z, floats),
        *cast,
    )
    dweight, dbias, dlinear_bias = (in_type(total, like.dtype) for total, like in zip(sums, gradients, strict=True))
    return dresidual, dx, dweight, dbias, dlinear_bias


def one_type(x: Tensor, residual: Tensor, *parameters: Tensor | None) -> list[Tensor | None]:
    """Contiguous parameters of one type: x's own where the kernels take that, else fp32."""
    dtype = torch.float32
    if x.is_cuda and all(each is None or each.dtype is x.dtype for each in (residual, *parameters)):
        dtype = x.dtype
    return [_native.as_parameter(parameter, dtype) for parameter in parameters]


def stream_backward_cuda(dy: Tensor, *others: Any, cast: tuple[Any, ...] = ()) -> Gradients | None:
    """The backward without dx, which a caller computes from dresidual by the same seed: the arguments of the
    registered op. None if another backend runs the call. ``cast``: scale, amax, rows, columns and format of dx in FP8,
    for Hopper's kernel that writes them."""
    *given, backend = others
    _, z, _, weight, bias, linear_bias = given[:6]
    dy = contiguous_rows(dy)
    if _choose(backend, dy, z, weight, bias, linear_bias).name != "cuda":
        return None
    dz = None if given[0] is None else contiguous_rows(given[0])
    return _backward_native(dy, dz, *given[1:], want_dx=False, cast=cast)


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
    has_linear_bias = any(each is not None for each in parameters[2:])
    return refuse_cuda_memory(x.get_device(), memory, x.shape[-1], *codes, int(has_linear_bias))


TABLE = BackendTable(
    OP,
    (
        native_cpu(_forward_native, _backward_native),
        native_cuda(_forward_native, _backward_native, rows=2, refuse=_refuse_size, refuse_on_gpu=_refuse_memory),
        triton_kernels(OP, refuse=_refuse_columns),
        torch_reference(reference.dropout_add_layer_norm_forward, reference.dropout_add_layer_norm_backward),
    ),
)
CALLS = KnownCalls(TABLE)
_INPUTS = (rows("x"), rows_like_first("residual"), *map(parameter, ("weight", "bias", "linear_bias")))
_P, _EPS = number("p", high=1.0), number("eps")
