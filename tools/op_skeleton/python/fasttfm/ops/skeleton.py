"""``skeleton``: what it computes, in one line."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.skeleton import reference
from fasttfm.ops.core.arguments import like_first, number, rows
from fasttfm.ops.core.backends import torch_reference
from fasttfm.ops.core.declare import Op


def skeleton(x: Tensor, *, factor: float = 1.0, backend: str | None = None) -> Tensor:
    """Multiplies ``x`` by ``factor``.

    Args:
        x: ``[..., C]``, fp32, bf16 or fp16 (fp64 on the reference backend).
        factor: A finite number.
        backend: Requests one backend; by default the first that supports the call.

    Returns:
        A contiguous tensor of ``x``'s shape and type.
    """
    y: Tensor = OP(x, factor, backend=backend)
    return y


_LARGEST = torch.finfo(torch.float32).max

# Registration, autograd, checks and the choice of a backend follow from this (ops/core/declare.py).
OP = Op(
    "skeleton",
    inputs=(rows("x"),),
    options=(number("factor", low=-_LARGEST, high=_LARGEST),),
    outputs=(like_first("y"),),
    saves=("x",),
    backward_options=("factor",),
    gradients=("x",),
    instead="torch.mul",
    backends=(torch_reference(reference.skeleton_forward, reference.skeleton_backward),),
)
