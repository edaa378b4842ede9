"""A transformer layer over packed tokens, step by step in plain torch: the specification, without dropout.

    post-LN    y1 = LN_a(x + attention(x))                 y = LN_b(y1 + mlp(y1))
    pre-LN     z1 = z + attention(x),  y1 = LN_a(z1)       z' = z1 + mlp(y1),  y = LN_b(z')

In a pre-LN model x [T, C] is already normalized, the residual stream is z, and LN_b is the next layer's first norm.
Autograd can differentiate it.
"""

from __future__ import annotations

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
    ops/transformer_block.py's BlockOptions and BlockParameters."""
    p, (tokens, width) = parameters, x.shape
    qkv = functional.linear(x, p.qkv_weight, p.qkv_bias).view(tokens, 3, options.heads, width // options.heads)
    context = torch.cat([_attention(each, options) for each in _sequences(qkv, cu_seqlens)])  # [T, C]
    z1 = (x if residual is None else residual) + functional.linear(context, p.out_weight, p.out_bias)
    y1 = functional.layer_norm(z1, (width,), p.norm_a_weight, p.norm_a_bias, options.eps_a)
    hidden = activate(functional.linear(y1, p.up_weight, p.up_bias), options.activation)  # [T, I]
    z = (y1 if residual is None else z1) + functional.linear(hidden, p.down_weight, p.down_bias)
    y = functional.layer_norm(z, (width,), p.norm_b_weight, p.norm_b_bias, options.eps_b)
    return y, None if residual is None else z


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
