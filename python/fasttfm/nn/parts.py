"""Steps of transformer layers: fused if their modules are plain (plain.py), otherwise calls of the modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm import ops
from fasttfm.nn.plain import activation_name, dropout_rate, is_plain_dropout, is_plain_linear, is_plain_norm
from fasttfm.nn.residual import add_norm, add_then_norm
from fasttfm.ops.core import checks
from fasttfm.ops.linear import dense, is_widened

Activation = str | Callable[[Tensor], Tensor]  # a key of ops.ACTIVATIONS, a function or a module


def known_activation(module: str, activation: Any) -> str:
    """The name of an activation, which a module's constructor checks."""
    if not isinstance(activation, str) or activation not in ops.ACTIVATIONS:
        raise checks.bad_value(module, "activation", f"one of {', '.join(ops.ACTIVATIONS)}", repr(activation))
    return activation


def product(linear: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """``linear(x)`` without its bias, and the bias, which a later fused op adds; None if it is already added."""
    return (dense(x, linear.weight), linear.bias) if is_plain_linear(linear) else (linear(x), None)


def linear_layer(linear: Any, x: Tensor) -> Tensor:
    """``linear(x)``. A plain layer multiplies in fp32 if torch's GEMM in x's dtype is very slow."""
    if is_widened(x) and is_plain_linear(linear):
        weight = linear.weight if isinstance(linear, nn.Linear) else linear.weight.t()  # transformers' Conv1D
        return dense(x, weight, linear.bias)
    y: Tensor = linear(x)
    return y


def linear_activation(linear: Any, activation: Activation, x: Tensor) -> Tensor:
    """``activation(linear(x))``"""
    name = activation if isinstance(activation, str) else activation_name(activation)
    if name is not None and is_plain_linear(linear):
        weight = linear.weight if isinstance(linear, nn.Linear) else linear.weight.t()  # transformers' Conv1D
        return ops.linear_gelu(x, weight, linear.bias, activation=name)
    if name is not None and hasattr(linear, "activated"):  # a PackedLinear applies the activation itself
        activated: Tensor = linear.activated(x, ops.ACTIVATIONS[name])
        return activated
    hidden: Tensor = linear(x)
    return ops.bias_gelu(hidden, activation=activation) if isinstance(activation, str) else activation(hidden)


def layer_norm(norm: Any, x: Tensor) -> Tensor:
    """``norm(x)``"""
    y: Tensor = ops.layer_norm(x, norm.weight, norm.bias, eps=norm.eps) if is_plain_norm(norm) else norm(x)
    return y


def residual_norm(
    norm: Any, branch: Tensor, residual: Tensor, *, bias: Tensor | None = None, dropout: Any = None
) -> Tensor:
    """``norm(residual + dropout(branch + bias))``; ``dropout`` is optional."""
    if dropout is not None and not is_plain_dropout(dropout):
        branch, bias, dropout = dropout(branch if bias is None else branch + bias), None, None
    p = 0.0 if dropout is None else dropout_rate(dropout)
    if is_plain_norm(norm) and residual.dtype in (branch.dtype, torch.float32):
        return add_norm(norm, branch, residual, linear_bias=bias, p=p)
    branch = branch if bias is None else branch + bias
    y: Tensor = norm(residual + (branch if dropout is None else dropout(branch)))
    return y


def packed_residual_norm(norm: Any, branch: Tensor, residual: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """``norm(residual + dropout(branch + linear_bias))`` and the sum, for packed tokens. ``options`` are those of
    ``add_then_norm``; the same seed drops the same elements for any ``norm``. Without a norm, returns the sum twice."""
    if residual.dtype not in (branch.dtype, torch.float32):
        branch = branch.to(residual.dtype)
    if norm is not None and is_plain_norm(norm):
        return add_then_norm(norm, branch, residual, **options)
    if not options.get("p") and options.get("linear_bias") is None:
        stream = residual + branch
        return stream if norm is None else norm(stream), stream
    _, stream = ops.dropout_add_layer_norm(branch, residual, prenorm=True, **options)
    return stream if norm is None else norm(stream), stream


def residual_then_norm(norm: Any, branch: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """``norm(residual + branch)``, and the sum, the residual stream of pre-LN blocks."""
    if is_plain_norm(norm) and residual.dtype in (branch.dtype, torch.float32):
        return add_then_norm(norm, branch, residual)
    stream = residual + branch
    return norm(stream), stream


def masked_lm_transform(dense: Any, activation: Activation, norm: Any, x: Tensor) -> Tensor:
    """``norm(activation(dense(x)))``, the input of the decoder."""
    name = activation if isinstance(activation, str) else activation_name(activation)
    kind = None if name is None else ops.ACTIVATIONS[name]
    if kind in ("gelu", "gelu_tanh") and is_plain_norm(norm):
        hidden, bias = product(dense, x)
        approximate = "tanh" if kind == "gelu_tanh" else "none"
        return ops.gelu_layer_norm(hidden, bias, norm.weight, norm.bias, approximate=approximate, eps=norm.eps)
    return layer_norm(norm, linear_activation(dense, activation, x))
