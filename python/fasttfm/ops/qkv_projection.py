"""``qkv_projection``: queries, keys and values of all heads by one matrix product, as attention reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import as_rows
from fasttfm.kernels.qkv_projection import reference
from fasttfm.ops import checks, linear
from fasttfm.ops.backends import (
    Backend,
    BackendTable,
    always,
    refuse_triton,
    requested,
    torch_reference,
    triton_absent,
)
from fasttfm.ops.column_sum import column_sum_op
from fasttfm.ops.gelu_product import refuse_cuda as refuse_hopper_product
from fasttfm.ops.layer_norm import layer_norm as apply_layer_norm
from fasttfm.ops.library import OpFunction, needs_gradient, register, unshared
from fasttfm.ops.rotary import check_positions, check_tables, rotary_op

OP = "qkv_projection"

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
    TABLE.check_name(backend)
    wanted = requested(backend)
    if layer_norm is not None:
        linear.check_input(OP, x)
        norm_weight, norm_bias, eps = _layer_norm_parameters(layer_norm)
        inner = "reference" if wanted == "reference" else None
        x = apply_layer_norm(x, norm_weight, norm_bias, eps=eps, backend=inner)
    fused = _fused(weight, bias) if isinstance(weight, (tuple, list)) else (weight, bias)
    tensors = linear.autocast(x, *fused)
    _check(num_heads, *tensors)
    _check_rotary(num_heads, tensors[0], cos, sin, positions, interleaved)
    apply = _QkvProjection.apply if needs_gradient(*tensors) else forward_op
    qkv: Tensor = apply(*tensors, num_heads, cos, sin, positions, interleaved, wanted)
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
        raise checks.bad_value(OP, "weight", "a tensor or three", f"{len(weights)}")
    if not isinstance(biases, (tuple, list)) or len(biases) != 3:
        raise checks.bad_type(OP, "bias", "None or three biases with three weights", type(biases).__name__)
    return fuse_qkv(*weights, *biases)


def _layer_norm_parameters(given: Any) -> LayerNorm:
    if not isinstance(given, tuple) or len(given) != 3:
        raise checks.bad_type(OP, "layer_norm", "None or a tuple (weight, bias, eps)", type(given).__name__)
    return given


def _check(num_heads: Any, x: Any, weight: Any, bias: Any) -> None:
    linear.check_input(OP, x)
    columns = x.shape[-1]
    linear.check_weight(OP, "weight", weight, columns, x)
    checks.check_shape(OP, "weight", weight, (3 * columns, columns))
    linear.check_bias(OP, "bias", bias, weight, x)
    if isinstance(num_heads, bool) or not isinstance(num_heads, (int, torch.SymInt)):
        raise checks.bad_type(OP, "num_heads", "an integer", type(num_heads).__name__)
    if num_heads < 1 or columns % num_heads:
        raise checks.bad_value(OP, "num_heads", f"a divisor of x's {columns} columns", num_heads)


def _check_rotary(num_heads: int, x: Tensor, cos: Any, sin: Any, positions: Any, interleaved: Any) -> None:
    if cos is None and sin is None:
        if positions is not None:
            raise checks.bad_value(OP, "positions", "None without cos and sin", type(positions).__name__)
        return
    if x.dim() < 2:
        raise checks.bad_value(OP, "x", "rows [..., S, C] next to cos and sin", f"shape {tuple(x.shape)}")
    check_tables(OP, x, _shape(x, num_heads, 3 * num_heads), cos, sin, positions, interleaved)


def _shape(x: Tensor, num_heads: int, *heads: int) -> tuple[int, ...]:
    return (*x.shape[:-1], *heads, x.shape[-1] // num_heads)


class _QkvProjection(OpFunction):
    op = OP
    instead = "torch.nn.functional.linear"

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        num_heads: int,
        cos: Tensor | None,
        sin: Tensor | None,
        positions: Tensor | None,
        interleaved: bool,
        backend: str | None,
    ) -> Tensor:
        qkv: Tensor = forward_op(x, weight, bias, num_heads, cos, sin, positions, interleaved, backend)
        ctx.save_for_backward(x, weight, cos, sin, *unshared(positions))
        ctx.interleaved, ctx.backend = interleaved, backend
        return qkv

    @staticmethod
    def backward(ctx: Any, dqkv: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin, positions = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        if cos is not None:
            dqkv = _rotated(dqkv, cos, sin, positions, ctx.interleaved, True, _ROTARY.get(ctx.backend))
        gradients = backward_op(dqkv, x, weight, wanted, ctx.backend)
        return (*(found if want else None for found, want in zip(gradients, wanted, strict=True)), *[None] * 6)


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int, *options: Any) -> Tensor:
    cos, sin, positions, interleaved, asked = options
    check_positions(OP, positions, cos)
    chosen = TABLE.select(asked, x, weight, bias, num_heads, cos, interleaved)
    qkv: Tensor = chosen.forward(x, weight, bias, num_heads, cos, sin, positions, interleaved)
    return qkv


def _forward_fake(x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int, *_: Any) -> Tensor:
    return x.new_empty(_shape(x, num_heads, 3, num_heads))


def _backward(
    dqkv: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool], backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = TABLE.select(backend, x, weight).backward(dqkv, x, weight, wanted)
    return gradients


def _backward_fake(
    dqkv: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool], backend: str | None
) -> tuple[Tensor, ...]:
    shapes = (x.shape, weight.shape, weight.shape[:1])
    return tuple(x.new_empty(shape if want else 0) for shape, want in zip(shapes, wanted, strict=True))


forward_op = register(
    "qkv_projection_forward(Tensor x, Tensor weight, Tensor? bias, SymInt num_heads, Tensor? cos, Tensor? sin,"
    " Tensor? positions, bool interleaved, str? backend) -> Tensor",
    _forward,
    _forward_fake,
)
backward_op = register(
    "qkv_projection_backward(Tensor dqkv, Tensor x, Tensor weight, bool[] wanted, str? backend)"
    " -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _backward,
    _backward_fake,
)


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
    # Not a view for autograd: users may change the result in place.
    result: Tensor = torch.ops.aten._unsafe_view(rotated, qkv.shape)
    return result


def _then_rotary(project: Callable[..., Tensor], backend: str | None) -> Callable[..., Tensor]:
    """A projection, and rotary's pass over its result."""

    def forward(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        num_heads: int,
        cos: Tensor | None,
        sin: Tensor | None,
        positions: Tensor | None,
        interleaved: bool,
    ) -> Tensor:
        qkv = project(x, weight, bias, num_heads)
        if cos is None or sin is None:
            return qkv
        return _rotated(qkv, cos, sin, positions, interleaved, False, backend)

    return forward


def _forward_torch(x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int) -> Tensor:
    return linear.matmul(as_rows(x), weight.t(), bias, shape=_shape(x, num_heads, 3, num_heads))


def _backward_torch(dqkv: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    rows = as_rows(x)
    gradient = dqkv.reshape(rows.shape[0], weight.shape[0])
    return (
        linear.matmul(gradient, weight, shape=x.shape) if wanted[0] else linear.empty_output(x),
        linear.matmul(gradient.t(), rows) if wanted[1] else linear.empty_output(x),
        column_sum_op(gradient, weight.dtype, None) if wanted[2] else linear.empty_output(x),
    )


def _forward_triton(*arguments: Any) -> Tensor:
    from fasttfm.kernels.qkv_projection import triton

    qkv: Tensor = triton.qkv_projection_forward_triton(*arguments)
    return qkv


def _forward_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    _: bool,
) -> Tensor:
    rows = as_rows(x)
    qkv = torch.empty(_shape(x, num_heads, 3, num_heads), dtype=x.dtype, device=x.device)
    rotary = (None if each is None else each.contiguous() for each in (cos, sin, positions))
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
    return refuse_hopper_product(x, weight, bias)


def _yield_to_gemm(x: Tensor, *_: Any, **__: Any) -> str | None:
    rows = x.numel() // x.shape[-1]
    return None if rows >= _LEAST_ROWS else f"torch's GEMM is as fast for fewer than {_LEAST_ROWS} rows, got {rows}"


_ROTATED = 64  # columns of a head: a part of the kernel's tile
_LEAST_ROWS = 4608  # for which the kernel is faster than torch's GEMM: docs/notes/kernel_designs.md
_SLOWER = "torch's GEMM is faster"

TABLE = BackendTable(
    OP,
    (
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
