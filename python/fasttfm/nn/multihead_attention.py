"""``MultiheadAttention``: torch.nn's module on top of the fused ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.nn.masks import Arguments, Masks
from fasttfm.nn.plain import is_plain_linear, register_plain_class
from fasttfm.ops.linear import dense

_NAME = "MultiheadAttention"
_ARGUMENTS = Arguments(_NAME, "attn_mask", "key_padding_mask")


class MultiheadAttention(torch.nn.MultiheadAttention):
    """Drop-in for ``torch.nn.MultiheadAttention``: same arguments, same state_dict, same numbers.

    With ``need_weights`` (torch's default) torch's own implementation runs, because the weights have to be in memory;
    pass ``need_weights=False`` for speed. Then there are these differences:

    - A query without visible keys gets the output projection's bias. So it does in torch, except that torch's fast path
      for inference gives NaN with a boolean mask.
    - ``out_proj`` is called if it is not a plain Linear (LoRA, hooks, pruning); torch only reads its weight.
    - ``is_causal`` needs no ``attn_mask``. With a ``key_padding_mask``, rows of ignored tokens are undefined.
    - Not supported, with an error: ``add_bias_kv``, ``add_zero_attn``, nested tensors, a ``key_padding_mask`` of
      numbers, an ``attn_mask`` for each sequence or head, or one together with a ``key_padding_mask`` unless it is
      causal.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
            if value:
                raise ValueError(f"{_NAME}: {name}: expected False (it is not supported), got {value}")
        layout = {"kdim": kdim, "vdim": vdim, "batch_first": batch_first, "device": device, "dtype": dtype}
        super().__init__(embed_dim, num_heads, dropout, bias, **layout)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if need_weights:
            options = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            result: tuple[Tensor, Tensor | None] = super().forward(query, key, value, *options)
            return result
        inputs = (query, key, value)
        q, k, v = (self._batch_first(name, x) for name, x in zip(("query", "key", "value"), inputs, strict=True))
        masks = _ARGUMENTS.resolve(self.num_heads, q, k, attn_mask, key_padding_mask, causal=is_causal)
        is_self = query is key and key is value
        context = self_attention(self, masks.enter(q), masks) if is_self else self._cross_attention(q, k, v, masks)
        if is_self or masks.causal:
            context = masks.leave(context)
        out = self.out_proj(context)
        if query.dim() == 2:
            return out[0], None
        return out if self.batch_first else out.transpose(0, 1), None

    def _batch_first(self, argument: str, x: Tensor) -> Tensor:
        """``x`` as [B, S, C]."""
        if x.is_nested or x.dim() not in (2, 3):
            got = "a nested tensor" if x.is_nested else f"shape {tuple(x.shape)}"
            raise ValueError(f"{_NAME}: {argument}: expected two or three dimensions, got {got}")
        if x.dim() == 2:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _cross_attention(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> Tensor:
        """[B, Sq, C]; keys and values are in the masks' order, queries only if attention is causal."""
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        inputs = (masks.enter(q) if masks.causal else q, masks.enter(k), masks.enter(v))
        heads = (
            dense(x, weight, bias).unflatten(-1, (self.num_heads, -1))
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        )
        return _attention(self, tuple(heads), masks)


def _has_one_projection(module: torch.nn.MultiheadAttention) -> bool:
    """Whether the module computes just ``self_attention`` and a plain output projection."""
    others = module.bias_k is not None or module.bias_v is not None or module.add_zero_attn
    return module._qkv_same_embed_dim and not others and is_plain_linear(module._modules["out_proj"])


for _kind in (MultiheadAttention, torch.nn.MultiheadAttention):
    register_plain_class(_kind, _has_one_projection)


def self_attention(module: torch.nn.MultiheadAttention, x: Tensor, masks: Masks) -> Tensor:
    """Attention of ``x`` [B, S, C] to itself, in the masks' order, without the output projection."""
    qkv = ops.qkv_projection(x, module.in_proj_weight, module.in_proj_bias, module.num_heads)
    return _attention(module, (qkv,), masks)


def _attention(module: torch.nn.MultiheadAttention, heads: tuple[Tensor, ...], masks: Masks) -> Tensor:
    context = ops.attention(*heads, dropout_p=module.dropout if module.training else 0.0, **masks.options())
    assert isinstance(context, Tensor)
    return context.flatten(-2)
