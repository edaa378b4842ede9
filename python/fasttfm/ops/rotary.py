"""``rotary``: rotary position embedding (RoPE) of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.rows import contiguous_like
from fasttfm.kernels.rotary import reference
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import checked, converted, flag, indices
from fasttfm.ops.core.backends import (
    Backend,
    from_triton,
    refuse_native_cpu,
    refuse_triton,
    torch_reference,
    triton_absent,
)
from fasttfm.ops.core.declare import LinearOp

NAME = "rotary"


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
    rotary_heads: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Rotates pairs of columns of each head by angles that grow with the token's position.

    Args:
        x: ``[B, S, H, D]`` or packed ``[T, H, D]``: fp32, bf16 or fp16 (fp64 on the reference backend). Strided heads
            are read in place: ``qkv[:, :2].flatten(1, 2)`` rotates the queries and keys of ``qkv [T, 3, H, D]`` in one
            call.
        cos, sin: ``[P, R / 2]``: cosines and sines of the angles of each position. The first R columns of a head are
            rotated, the others copied. They have no gradient. fp32 is usual next to a 16-bit ``x``.
        positions: int64 or int32, ``x``'s shape without heads and columns; by default a token's index in its sequence,
            or its row in ``[T, H, D]``. For packed sequences ``position_ids_from_cu_seqlens`` returns them. They are
            not validated on a GPU, where a position outside of the tables gives NaN.
        interleaved: Pairs are columns 0 and 1, 2 and 3, ... (GPT-J); by default columns i and i + R / 2 (GPT-NeoX,
            Llama, ModernBERT).
        rotary_heads: Heads from this one on are copied: all are rotated by default. ``2 H`` of
            ``qkv.flatten(-3, -2)`` rotates the queries and keys of ``qkv [..., 3, H, D]``, and the result is one tensor
            for ``attention``.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        ``x``'s shape and type, contiguous. Arithmetic is fp32, rounded once.
    """
    _check(x, cos, sin, positions, interleaved, rotary_heads)
    rotated = x.shape[-2] if rotary_heads is None else rotary_heads
    return OP(x, cos, sin, positions, interleaved, rotated, False, backend=backend)


def _check(x: Any, cos: Any, sin: Any, positions: Any, interleaved: Any, rotary_heads: Any) -> None:
    checks.check_floating(NAME, "x", x)
    if x.dim() < 3 or 0 in x.shape[-2:]:
        raise checks.bad_value(NAME, "x", "shape [..., S, H, D] or [T, H, D]", f"shape {tuple(x.shape)}")
    check_tables(NAME, x, x.shape, cos, sin, positions, interleaved)
    if rotary_heads is not None:
        if isinstance(rotary_heads, bool) or not isinstance(rotary_heads, (int, torch.SymInt)):
            raise checks.bad_type(NAME, "rotary_heads", "an integer", type(rotary_heads).__name__)
        if not 0 <= rotary_heads <= x.shape[-2]:
            raise checks.bad_value(NAME, "rotary_heads", f"0 to x's {x.shape[-2]} heads", rotary_heads)


def check_tables(
    op: str, x: Tensor, heads: Sequence[int], cos: Any, sin: Any, positions: Any, interleaved: Any
) -> None:
    """Raises if tables or positions are invalid for heads of the shape ``heads`` [..., S, H, D], which are x or
    computed from it."""
    for name, table in (("cos", cos), ("sin", sin)):
        checks.check_floating(op, name, table)
        checks.check_device(op, name, table, like=x)
        if table.requires_grad and torch.is_grad_enabled():
            raise checks.bad_value(op, name, "a tensor that requires no gradient", "one that does; detach() it")
    if cos.dim() != 2 or not 1 <= cos.shape[1] <= heads[-1] // 2:
        expected = f"shape [positions, R / 2] with R up to a head's {heads[-1]} columns"
        raise checks.bad_value(op, "cos", expected, f"shape {tuple(cos.shape)}")
    if positions is None and heads[-3] > cos.shape[0]:
        raise checks.bad_value(op, "cos", f"at least {heads[-3]} positions, as x has", cos.shape[0])
    checks.check_shape(op, "sin", sin, cos.shape)
    checks.check_double(op, x=x, cos=cos, sin=sin)
    if not isinstance(interleaved, bool):
        raise checks.bad_type(op, "interleaved", "a bool", type(interleaved).__name__)
    if positions is not None:
        checks.check_index(op, "positions", positions)
        checks.check_shape(op, "positions", positions, heads[:-2])
        checks.check_device(op, "positions", positions, like=x)


def check_positions(op: str, positions: Tensor | None, cos: Tensor) -> None:
    """Raises if a position is outside of the tables; positions on a GPU are not validated."""
    if positions is not None and positions.is_cpu and positions.numel():
        least, most = (int(bound) for bound in positions.aminmax())
        if least < 0 or most >= cos.shape[0]:
            expected = f"numbers in [0, {cos.shape[0]}), the rows of cos"
            raise checks.bad_value(op, "positions", expected, least if least < 0 else most)


# ---- backends --------------------------------------------------------------------------------------------------------


def _native_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    rotary_heads: int,
    inverse: bool,
) -> Tensor:
    y = contiguous_like(x)
    if y.numel() == 0:
        return y
    heads = (x if x.stride(-1) == 1 else x.contiguous()).reshape(-1, *x.shape[-2:])
    tables = (table.float().contiguous() for table in (cos, sin))
    positions = None if positions is None else positions.long().contiguous()
    _native.core().rotary_cpu(heads, *tables, positions, y, x.shape[-3], rotary_heads, -1.0 if inverse else 1.0)
    return y


def _refuse_cpu(x: Tensor, interleaved: bool = False) -> str | None:
    return refuse_native_cpu(x) or ("takes pairs of columns i and i + R / 2" if interleaved else None)


_MOST_COLUMNS = 1024  # of a head: one tile of Triton's holds them


def _refuse_triton(x: Tensor, interleaved: bool = False) -> str | None:
    if x.shape[-1] > _MOST_COLUMNS:
        return f"takes heads of up to {_MOST_COLUMNS} columns, got {x.shape[-1]}"
    return refuse_triton(x)


# ---- the declaration -------------------------------------------------------------------------------------------------


def _rotate_back(dy: Tensor, shape: Any, dtype: Any, *others: Any) -> Tensor:
    """The gradient is the inverse rotation: the forward with negated angles."""
    *passed, inverse, backend = others
    return OP.apply(dy, *passed, not inverse, backend)


OP = LinearOp(
    NAME,
    inputs=(checked("x"), checked("cos"), checked("sin"), indices("positions", optional=True)),
    options=(flag("interleaved"), converted("rotary_heads", "SymInt"), flag("inverse")),
    output=lambda x, *_: x.new_empty(x.shape),
    adjoint=_rotate_back,
    chosen_by=("interleaved",),
    check_values=lambda x, cos, sin, positions, *_: check_positions(NAME, positions, cos),
    backends=(
        Backend("cpu", _native.missing, _refuse_cpu, _native_rotary, _native_rotary),
        Backend(
            "triton",
            triton_absent,
            _refuse_triton,
            from_triton(NAME, "rotary_triton"),
            from_triton(NAME, "rotary_triton"),
        ),
        torch_reference(reference.rotary, reference.rotary),
    ),
)
rotary_op = OP.forward  # for ops that are made of others
