"""``skeleton``: what it computes, in one line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.skeleton import reference
from fasttfm.ops import checks
from fasttfm.ops.backends import Backend, BackendTable, always, requested
from fasttfm.ops.library import OpFunction, needs_gradient, register

OP = "skeleton"


def skeleton(x: Tensor, *, factor: float = 1.0, backend: str | None = None) -> Tensor:
    """Multiplies ``x`` by ``factor``.

    Args:
        x: Any shape, fp32, bf16 or fp16 (fp64 on the reference backend).
        factor: A finite number.
        backend: Requests one backend; by default the first that can serve the call does.

    Returns:
        A contiguous tensor of ``x``'s shape and type.
    """
    _check(x, factor)
    TABLE.check_name(backend)
    arguments = (x, float(factor), requested(backend))
    y: Tensor = _Skeleton.apply(*arguments) if needs_gradient(x) else forward_op(*arguments)
    return y


def _check(x: Any, factor: Any) -> None:
    checks.check_floating(OP, "x", x)
    largest = torch.finfo(torch.float32).max
    checks.check_number(OP, "factor", factor, low=-largest, high=largest)


class _Skeleton(OpFunction):
    op = OP
    instead = "torch.mul"

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, backend: str | None) -> Tensor:
        ctx.factor, ctx.backend = factor, backend
        y: Tensor = forward_op(x, factor, backend)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return backward_op(dy, ctx.factor, ctx.backend), None, None


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(x: Tensor, factor: float, backend: str | None) -> Tensor:
    y: Tensor = TABLE.select(backend, x).forward(x, factor)
    return y


def _backward(dy: Tensor, factor: float, backend: str | None) -> Tensor:
    dx: Tensor = TABLE.select(backend, dy).backward(dy, factor)
    return dx


def _like_first(tensor: Tensor, factor: float, backend: str | None) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


forward_op = register("skeleton_forward(Tensor x, float factor, str? backend) -> Tensor", _forward, _like_first)
backward_op = register("skeleton_backward(Tensor dy, float factor, str? backend) -> Tensor", _backward, _like_first)


# ---- backends --------------------------------------------------------------------------------------------------------

TABLE = BackendTable(
    OP,
    (Backend("reference", always, lambda *_: None, reference.skeleton_forward, reference.skeleton_backward),),
)
