"""A gated activation, in plain torch: the specification. The activations are in kernels/common/activation.py.

    gate, up = the two halves of x + bias        y = activation(gate) * up
    dgate = dy * up * activation'(gate)        dup = dy * activation(gate)
    dbias = sum over rows of dx, whose halves are dgate and dup

x is [..., 2 C], y is [..., C]. Rows are all dimensions but the last. Arithmetic is fp32 (fp64 for fp64 input); only y,
dx and dbias are rounded to the tensors' own types, dbias from the sum of unrounded dx.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.common.activation import activate, derivative
from fasttfm.kernels.common.linear import accumulate


def gated_activation(x: Tensor, bias: Tensor | None, kind: str, gate_first: bool) -> Tensor:
    """The formula as autograd can differentiate it; tests hold every backend against this."""
    gate, up = _halves(x, bias, gate_first)
    return (activate(gate, kind) * up).to(x.dtype)


def gated_activation_forward(x: Tensor, bias: Tensor | None, kind: str, gate_first: bool) -> Tensor:
    """Returns y [..., C] in x's type, contiguous."""
    return gated_activation(x, bias, kind, gate_first).contiguous()


def gated_activation_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, kind: str, gate_first: bool, want_dbias: bool
) -> tuple[Tensor, Tensor]:
    """Returns dx [..., 2 C] and dbias [2 C], each in its tensor's type; dbias is empty if it is not needed."""
    gate, up = _halves(x, bias, gate_first)
    gradient = accumulate(dy)
    dgate, dup = gradient * up * derivative(gate, kind), gradient * activate(gate, kind)
    dx = torch.cat([dgate, dup] if gate_first else [dup, dgate], dim=-1)
    dbias = x.new_empty(0)
    if bias is not None and want_dbias:
        dbias = dx.reshape(-1, x.shape[-1]).sum(dim=0).to(bias.dtype)
    return dx.to(x.dtype), dbias


def _halves(x: Tensor, bias: Tensor | None, gate_first: bool) -> tuple[Tensor, Tensor]:
    """The gate and up, with the bias added."""
    biased = accumulate(x) if bias is None else accumulate(x) + accumulate(bias)
    first, second = biased.chunk(2, dim=-1)
    return (first, second) if gate_first else (second, first)
