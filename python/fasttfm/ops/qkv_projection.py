"""``qkv_projection``: queries, keys and values of all heads by one matrix product, as attention reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import as_rows
from fasttfm.kernels.qkv_projection import reference
from fasttfm.ops import linear
from fasttfm.ops.column_sum import column_sum_op
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import Gradient, Output, checked, converted, indices
from fasttfm.ops.core.backends import (
    Backend,
    always,
    refuse_triton,
    requested,
    torch_reference,
    triton_absent,
)
from fasttfm.ops.core.declare import Op
from fasttfm.ops.core.library import OpFunction, unshared
from fasttfm.ops.gelu_gemm import refuse_cuda as refuse_hopper_gemm
from fasttfm.ops.layer_norm import layer_norm as apply_layer_norm
from fasttfm.ops.rotary import check_positions, check_tables, rotary_op

NAME = "qkv_projection"

LayerNorm = tuple[Tensor | None, Tensor | None, float]  # weight, bias, eps


def qkv_projection(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None,
    num_heads: int,
    *,
    layer_norm: LayerNorm | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Projects ``x`` to queries, keys and values.

    Args:
        x: ``[B, S, C]`` or packed ``[T, C]`` (any leading shape), fp32, bf16, fp16 or fp64.
        weight: ``[3C, C]``, rows of q, then k, then v. Three weights ``[C, C]`` are fused at every call, which is
            slower than fusing them once (``fuse_qkv``).
        bias: ``[3C]`` or None; three, each ``[C]`` or None, go with three weights.
        num_heads: H; it divides C.
        layer_norm: Weight, bias and eps of a LayerNorm in front (pre-LN). Its output is kept for the backward.
        cos, sin: Tables ``[P, R / 2]`` of a rotary position embedding, which turns the first R columns of each query
            and key; values are copied. ``positions`` and ``interleaved`` are those of ``rotary``: the result is that of
            ``rotary(qkv.flatten(-3, -2), cos, sin, rotary_heads=2 * num_heads)``.
        backend: Requests one backend; by default the first that supports the call runs it.

    Returns:
        ``[..., 3, H, C / H]``, contiguous: q, k and v are views of it. Parameters have x's type; under autocast
        everything is cast to autocast's, as around ``torch.nn.Linear``.
    """
    if layer_norm is not None:
        linear.check_input(NAME, x)
        norm_weight, norm_bias, eps = _layer_norm_parameters(layer_norm)
        inner = "reference" if requested(backend) == "reference" else None
        x = apply_layer_norm(x, norm_weight, norm_bias, eps=eps, backend=inner)
    fused = _fused(weight, bias) if isinstance(weight, (tuple, list)) else (weight, bias)
    tensors = linear.autocast(x, *fused)
    _check(num_heads, *tensors)
    _check_rotary(num_heads, tensors[0], cos, sin, positions, interleaved)
    qkv: Tensor = OP.apply(*tensors, cos, sin, positions, num_heads, interleaved, backend=backend)
    return qkv


def fuse_qkv(
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One weight ``[3C, C]`` and one bias ``[3C]`` out of three; a missing bias counts as zero if others are given.

    Autograd carries gradients back to the three.
    """
    weights, biases = (q_weight, k_weight, v_weight), (q_bias, k_bias, v_bias)
    for name, weight in zip(("q_weight", "k_weight", "v_weight"), weights, strict=True):
        checks.check_floating("fuse_qkv", name, weight)
        if weight.dim() != 2:
            raise checks.bad_value("fuse_qkv", name, "a matrix", f"shape {tuple(weight.shape)}")
        checks.check_shape("fuse_qkv", name, weight, q_weight.shape)
    for name, bias in zip(("q_bias", "k_bias", "v_bias"), biases, strict=True):
        checks.check_floating("fuse_qkv", name, bias, optional=True)
        checks.check_shape("fuse_qkv", name, bias, (q_weight.shape[0],))
    if all(bias is None for bias in biases):
        return torch.cat(weights), None
    filled = [q_weight.new_zeros(q_weight.shape[0]) if bias is None else bias for bias in biases]
    return torch.cat(weights), torch.cat(filled)


def _fused(weights: Sequence[Any], biases: Any) -> tuple[Tensor, Tensor | None]:
    biases = (None, None, None) if biases is None else biases
    if len(weights) != 3:
        raise checks.bad_value(NAME, "weight", "a tensor or three", f"{len(weights)}")
    if not isinstance(biases, (tuple, list)) or len(biases) != 3:
        raise checks.bad_type(NAME, "bias", "None or three biases with three weights", type(biases).__name__)
    return fuse_qkv(*weights, *biases)


def _layer_norm_parameters(layer_norm: Any) -> LayerNorm:
    if not isinstance(layer_norm, tuple) or len(layer_norm) != 3:
        raise checks.bad_type(NAME, "layer_norm", "None or a tuple (weight, bias, eps)", type(layer_norm).__name__)
    return layer_norm


def _check(num_heads: Any, x: Any, weight: Any, bias: Any) -> None:
    linear.check_input(NAME, x)
    columns = x.shape[-1]
    linear.check_weight(NAME, "weight", weight, columns, x)
    checks.check_shape(NAME, "weight", weight, (3 * columns, columns))
    linear.check_bias(NAME, "bias", bias, weight, x)
    if isinstance(num_heads, bool) or not isinstance(num_heads, (int, torch.SymInt)):
        raise checks.bad_type(NAME, "num_heads", "an integer", type(num_heads).__name__)
    if num_heads < 1 or columns % num_heads:
        raise checks.bad_value(NAME, "num_heads", f"a divisor of x's {columns} columns", num_heads)


def _check_rotary(num_heads: int, x: Tensor, cos: Any, sin: Any, positions: Any, interleaved: Any) -> None:
    if cos is None and sin is None:
        if positions is not None:
            raise checks.bad_value(NAME, "positions", "None without cos and sin", type(positions).__name__)
        return
    if x.dim() < 2:
        raise checks.bad_value(NAME, "x", "rows [..., S, C] next to cos and sin", f"shape {tuple(x.shape)}")
    check_tables(NAME, x, _shape(x, num_heads, 3 * num_heads), cos, sin, positions, interleaved)


def _shape(x: Tensor, num_heads: int, *heads: int) -> tuple[int, ...]:
    return (*x.shape[:-1], *heads, x.shape[-1] // num_heads)


class _QkvProjection(OpFunction):
    """The gradients of queries and keys are rotated back before those of the projection are computed."""

    op = NAME
    instead = "torch.nn.functional.linear"

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, weight, _, cos, sin, positions, _, interleaved, backend = arguments
        qkv: Tensor = OP.forward(*arguments)
        ctx.save_for_backward(x, weight, cos, sin, *unshared(positions))
        ctx.interleaved, ctx.backend = interleaved, backend
        return qkv

    @staticmethod
    def backward(ctx: Any, dqkv: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin, positions = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        if cos is not None:
            dqkv = _rotated(dqkv, cos, sin, positions, ctx.interleaved, True, _ROTARY.get(ctx.backend))
        gradients = OP.backward(dqkv, x, weight, needed, ctx.backend)
        return (*(gradient if want else None for gradient, want in zip(gradients, needed, strict=True)), *[None] * 6)


# ---- backends --------------------------------------------------------------------------------------------------------


# Who turns queries and keys where the projection's backend does not, by its name.
_ROTARY = {"reference": "reference", "triton": "triton"}


def _rotated(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    inverse: bool,
    backend: str | None,
) -> Tensor:
    """Queries and keys of qkv [..., 3, H, D] rotated, or rotated back; values copied."""
    heads = qkv.flatten(-3, -2)
    rotated = rotary_op(heads, cos, sin, positions, interleaved, 2 * qkv.shape[-2], inverse, backend)
    # Autograd must not see a view: users may change the result in place.
    result: Tensor = torch.ops.aten._unsafe_view(rotated, qkv.shape)
    return result


def _then_rotary(project: Callable[..., Tensor], backend: str | None) -> Callable[..., Tensor]:
    """A projection, and rotary's pass over its result."""

    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        positions: Tensor | None,
        num_heads: int,
        interleaved: bool,
    ) -> Tensor:
        qkv = project(x, weight, bias, num_heads)
        if cos is None or sin is None:
            return qkv
        return _rotated(qkv, cos, sin, positions, interleaved, False, backend)

    return forward


def _forward_torch(x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int) -> Tensor:
    return linear.matmul(as_rows(x), weight.t(), bias, shape=_shape(x, num_heads, 3, num_heads))


def _backward_torch(dqkv: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    rows = as_rows(x)
    gradient = dqkv.reshape(rows.shape[0], weight.shape[0])
    return (
        linear.matmul(gradient, weight, shape=x.shape) if needed[0] else linear.empty_output(x),
        linear.matmul(gradient.t(), rows) if needed[1] else linear.empty_output(x),
        column_sum_op(gradient, weight.dtype, None) if needed[2] else linear.empty_output(x),
    )


def _forward_triton(*arguments: Any) -> Tensor:
    from fasttfm.kernels.qkv_projection import triton

    x, weight, bias, *rotary, num_heads, interleaved = arguments
    qkv: Tensor = triton.qkv_projection_forward_triton(x, weight, bias, num_heads, *rotary, interleaved)
    return qkv


def _forward_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    num_heads: int,
    _: bool,
) -> Tensor:
    rows = as_rows(x)
    qkv = torch.empty(_shape(x, num_heads, 3, num_heads), dtype=x.dtype, device=x.device)
    rotary = (None if table is None else table.contiguous() for table in (cos, sin, positions))
    _native.core().qkv_projection_cuda(rows, weight, bias, qkv, *rotary, x.shape[-2] if x.dim() > 1 else 1)
    return qkv


def _refuse_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    num_heads: int | None = None,
    cos: Tensor | None = None,
    interleaved: bool = False,
    **_: Any,
) -> str | None:
    if cos is not None and (interleaved or x.shape[-1] != _ROTATED * (num_heads or 0) or 2 * cos.shape[-1] != _ROTATED):
        return f"takes rotary embedding only of heads of {_ROTATED} columns, of all of them, not interleaved"
    return refuse_hopper_gemm(x, weight, bias)


def _yield_to_gemm(x: Tensor, *_: Any, **__: Any) -> str | None:
    rows = x.numel() // x.shape[-1]
    return None if rows >= _LEAST_ROWS else f"torch's GEMM is as fast for fewer than {_LEAST_ROWS} rows, got {rows}"


_ROTATED = 64  # columns of a head: a part of the kernel's tile
_LEAST_ROWS = 4608  # for which the kernel is faster than torch's GEMM: docs/notes/kernel_designs.md
_SLOWER = "torch's GEMM is faster"

OP = Op(
    NAME,
    inputs=(
        checked("x", flagged=True),
        checked("weight", flagged=True),
        checked("bias", optional=True, flagged=True),
        checked("cos", optional=True),
        checked("sin", optional=True),
        indices("positions", optional=True),
    ),
    options=(converted("num_heads", "SymInt"), converted("interleaved", "bool")),
    outputs=(Output("qkv", lambda x, *others: x.new_empty(_shape(x, others[5], 3, others[5]))),),
    saves=("x", "weight"),
    gradients=("x", "weight", Gradient("bias", lambda dqkv, x, weight, *_: x.new_empty(weight.shape[0]))),
    flag_list=True,
    chosen_by=("x", "weight", "bias", "num_heads", "cos", "interleaved"),
    backward_chosen_by=("x", "weight"),
    check_values=lambda *arguments: check_positions(NAME, arguments[5], arguments[3]),
    function=_QkvProjection,
    backends=(
        Backend(
            "cuda",
            _native.missing_hopper,
            _refuse_cuda,
            _forward_cuda,
            _backward_torch,
            yield_forward=_yield_to_gemm,
        ),
        Backend("torch", always, lambda *_, **__: None, _then_rotary(_forward_torch, None), _backward_torch),
        Backend(
            "triton",
            triton_absent,
            lambda x, *_, **__: refuse_triton(x),
            _forward_triton,
            _backward_torch,
            by_name=_SLOWER,
        ),
        torch_reference(_then_rotary(reference.qkv_projection, "reference"), reference.qkv_projection_backward),
    ),
)
