"""A transformer layer over packed tokens, step by step in plain torch: the specification, without dropout.

    post-LN    y1 = LN_a(x + attention(x))                 y = LN_b(y1 + mlp(y1))
    pre-LN     z1 = z + attention(x),  y1 = LN_a(z1)       z' = z1 + mlp(y1),  y = LN_b(z')

In a pre-LN model x [T, C] is already normalized, the residual stream is z, and LN_b is the next layer's first norm.
Autograd can differentiate it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fasttfm.kernels.common.activation import activate


def transformer_block(
    x: Tensor, residual: Tensor | None, cu_seqlens: Tensor, options: Any, parameters: Any
) -> tuple[Tensor, Tensor | None]:
    """Returns y [T, C], and z' [T, C] in a pre-LN model. ``options`` and ``parameters`` have the fields of
    ops/layers/transformer_block.py's BlockOptions and BlockParameters."""
    p, (_, width) = parameters, x.shape
    context = _attend(functional.linear(x, p.qkv_weight, p.qkv_bias), cu_seqlens, options)
    z1 = (x if residual is None else residual) + functional.linear(context, p.out_weight, p.out_bias)
    y1 = functional.layer_norm(z1, (width,), p.norm_a_weight, p.norm_a_bias, options.eps_a)
    hidden = activate(functional.linear(y1, p.up_weight, p.up_bias), options.activation)  # [T, I]
    z = (y1 if residual is None else z1) + functional.linear(hidden, p.down_weight, p.down_bias)
    y = functional.layer_norm(z, (width,), p.norm_b_weight, p.norm_b_bias, options.eps_b)
    return y, None if residual is None else z


def folded_layers(x: Tensor, cu_seqlens: Tensor, options: Any, layers: Sequence[Any], folded: Sequence[Any]) -> Tensor:
    """Post-LN layers whose LayerNorms, except for the last one, are folded into the linear layers that read them:
    ``folded`` has the fields of ops/folded_layers.py's FoldedLayer. x [T, C] is normalized."""
    z, mean, rstd, width = x, torch.zeros_like(x[:, :1]), torch.ones_like(x[:, :1]), x.shape[1]
    for p, f in zip(layers, folded, strict=True):
        context = _attend(rstd * functional.linear(z, f.qkv_weight) + f.qkv_bias, cu_seqlens, options)
        z1 = functional.linear(context, p.out_weight) + f.out_bias + (z - mean) * rstd * f.residual_a
        mean, rstd = _statistics(z1, options.eps_a)
        hidden = activate(rstd * functional.linear(z1, f.up_weight) + f.up_bias, options.activation)
        z = functional.linear(hidden, p.down_weight) + f.down_bias + (z1 - mean) * rstd * f.residual_b
        mean, rstd = _statistics(z, options.eps_b)
    return functional.layer_norm(z, (width,), layers[-1].norm_b_weight, layers[-1].norm_b_bias, options.eps_b)


def layers_with_first_norm_folded(
    x: Tensor, cu_seqlens: Tensor, options: Any, layers: Sequence[Any], folded: Sequence[Any]
) -> Tensor:
    """The same with only the LayerNorm after attention folded, so that x of every layer is normalized."""
    for p, f in zip(layers, folded, strict=True):
        context = _attend(functional.linear(x, p.qkv_weight, p.qkv_bias), cu_seqlens, options)
        z1 = x + functional.linear(context, p.out_weight, p.out_bias)
        mean, rstd = _statistics(z1, options.eps_a)
        hidden = activate(rstd * functional.linear(z1, f.up_weight) + f.up_bias, options.activation)
        y1 = (z1 - mean) * rstd * p.norm_a_weight + p.norm_a_bias
        z = y1 + functional.linear(hidden, p.down_weight, p.down_bias)
        x = functional.layer_norm(z, x.shape[1:], p.norm_b_weight, p.norm_b_bias, options.eps_b)
    return x


def _statistics(z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """mean and 1 / sqrt(variance + eps) of rows, [T, 1] each."""
    return z.mean(1, keepdim=True), (z.var(1, correction=0, keepdim=True) + eps).rsqrt()


def _attend(qkv: Tensor, cu_seqlens: Tensor, options: Any) -> Tensor:
    """[T, C] from [T, 3 C]"""
    tokens, columns = qkv.shape
    separate = qkv.view(tokens, 3, options.heads, columns // 3 // options.heads)
    return torch.cat([_attention(sequence, options) for sequence in _sequences(separate, cu_seqlens)])


def _sequences(packed: Tensor, cu_seqlens: Tensor) -> list[Tensor]:
    return [packed[first:end] for first, end in pairwise(cu_seqlens.tolist())]


def _attention(qkv: Tensor, options: Any) -> Tensor:
    """softmax(q k^T / sqrt(D)) v of one sequence: [N, C] from [N, 3, H, D]."""
    q, k, v = qkv.permute(1, 2, 0, 3)  # [H, N, D] each
    distance = torch.arange(len(qkv), device=qkv.device) - torch.arange(len(qkv), device=qkv.device)[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)  # [N, N]: whether the key is in the query's window
    if options.window_left >= 0:
        seen &= distance >= -options.window_left
    if options.window_right >= 0:
        seen &= distance <= options.window_right
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)  # [H, N, N]
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
