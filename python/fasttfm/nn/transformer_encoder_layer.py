"""``TransformerEncoderLayer``: torch.nn's module on top of the fused ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fasttfm import ops
from fasttfm.nn.masks import Arguments, Masks, additive
from fasttfm.nn.multihead_attention import MultiheadAttention, self_attention
from fasttfm.nn.parts import linear_activation, residual_norm, residual_then_norm
from fasttfm.nn.plain import (
    activation_name,
    dropout_rate,
    is_plain,
    is_plain_dropout,
    is_plain_linear,
    is_plain_norm,
    register_plain_class,
)
from fasttfm.nn.residual import add_norm, add_then_norm, norm
from fasttfm.ops.linear import dense

_NAME = "TransformerEncoderLayer"
_ARGUMENTS = Arguments(_NAME, "src_mask", "src_key_padding_mask")


class TransformerEncoderLayer(torch.nn.TransformerEncoderLayer):
    """Drop-in for ``torch.nn.TransformerEncoderLayer``: same arguments, same state_dict, same numbers.

    The layer is fused while its modules are plain and its activation is ReLU, GELU in either form or SiLU. A module
    with hooks or a parametrization, one that replaces another (LoRA) and any other activation are called as torch calls
    them, with fused ops around them. A subclass's ``_sa_block`` and ``_ff_block`` are called too, with the masks as
    they were given. Masks are those of ``fasttfm.nn.MultiheadAttention``. Dropout draws other random numbers than
    torch's. Under autocast the output has autocast's type, where torch's is fp32.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = functional.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not callable(activation) and activation not in ("relu", "gelu"):
            raise ValueError(f'{_NAME}: activation: expected "relu", "gelu" or a callable, got {activation!r}')
        sizes = (d_model, nhead, dim_feedforward, dropout)
        super().__init__(*sizes, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype)
        self.self_attn.__class__ = MultiheadAttention  # keeps the parameters that torch has initialized

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        check_source(_ARGUMENTS, src)
        if is_fusable(self):
            return run_layers(_ARGUMENTS, [self], src, src_mask, src_key_padding_mask, causal=is_causal)
        x, masks = src, (src_mask, src_key_padding_mask, is_causal)
        if self.norm_first:
            y, x = residual_then_norm(self.norm2, self._sa_block(self.norm1(x), *masks), x)
            return x + self._ff_block(y)
        x = residual_norm(self.norm1, self._sa_block(x, *masks), x)
        return residual_norm(self.norm2, self._ff_block(x), x)

    def _sa_block(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        if not any(isinstance(module, MultiheadAttention) for module in self.self_attn.modules()):
            # Another attention module gets the masks that torch's layer passes.
            if is_causal and attn_mask is None:
                length = x.shape[1 if self.self_attn.batch_first and x.dim() == 3 else 0]
                attn_mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            attn_mask, key_padding_mask = additive(attn_mask, x.dtype), additive(key_padding_mask, x.dtype)
        return super()._sa_block(x, attn_mask, key_padding_mask, is_causal)

    def _ff_block(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout2(self.linear2(self.dropout(linear_activation(self.linear1, self.activation, x))))
        return y

    def encode(self, x: Tensor, masks: Masks) -> Tensor:
        """The fused layer for ``x`` [B, S, C] in the masks' order.

        The bias of a block's last linear layer, the dropout after it and the residual connection are fused with the
        LayerNorm that follows.
        """
        projection, p = self.self_attn.out_proj, dropout_rate(self.dropout1)
        if self.norm_first:
            context = self_attention(self.self_attn, norm(self.norm1, x), masks)
            branch = dense(context, projection.weight)
            y, z = add_then_norm(self.norm2, branch, x, linear_bias=projection.bias, p=p)
            p = dropout_rate(self.dropout2)
            return z + functional.dropout(self._feed_forward(y, self.linear2.bias), p, p > 0)
        branch = dense(self_attention(self.self_attn, x, masks), projection.weight)
        x = add_norm(self.norm1, branch, x, linear_bias=projection.bias, p=p)
        branch = self._feed_forward(x, None)
        return add_norm(self.norm2, branch, x, linear_bias=self.linear2.bias, p=dropout_rate(self.dropout2))

    def _feed_forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        first, second, dropped = self.linear1, self.linear2, dropout_rate(self.dropout)
        name = activation_name(self.activation)
        assert name is not None
        if dropped == 0:
            return ops.mlp(x, first.weight, first.bias, second.weight, bias, activation=name)
        inner = ops.linear_gelu(x, first.weight, first.bias, activation=name)
        return dense(functional.dropout(inner, dropped), second.weight, bias)


def is_fusable(layer: TransformerEncoderLayer) -> bool:
    """Whether everything in a layer is plain, so that ``encode`` computes what calls of its modules would."""
    kind, attributes, modules = type(layer), layer.__dict__, layer._modules
    return (
        kind._sa_block is TransformerEncoderLayer._sa_block
        and kind._ff_block is TransformerEncoderLayer._ff_block
        and "_sa_block" not in attributes
        and "_ff_block" not in attributes
        and activation_name(layer.activation) is not None
        and is_plain(modules["self_attn"])
        and is_plain_linear(modules["linear1"], modules["linear2"])
        and is_plain_norm(modules["norm1"], modules["norm2"])
        and is_plain_dropout(modules["dropout"], modules["dropout1"], modules["dropout2"])
    )


register_plain_class(TransformerEncoderLayer, is_fusable)


def check_source(arguments: Arguments, src: Tensor) -> None:
    if src.is_nested or src.dim() not in (2, 3):
        got = "a nested tensor" if src.is_nested else f"shape {tuple(src.shape)}"
        raise ValueError(f"{arguments.module}: src: expected two or three dimensions, got {got}")


def run_layers(
    arguments: Arguments,
    layers: list[TransformerEncoderLayer],
    src: Tensor,
    mask: Tensor | None,
    ignored: Tensor | None,
    *,
    causal: bool,
) -> Tensor:
    """Runs fused layers over ``src`` [S, B, C], [B, S, C] or [S, C]. Tokens are moved to the masks' order once."""
    attention = layers[0].self_attn
    transposed = src.dim() == 3 and not attention.batch_first
    x = src[None] if src.dim() == 2 else src.transpose(0, 1) if transposed else src
    masks = arguments.resolve(attention.num_heads, x, x, mask, ignored, causal=causal)
    x = masks.enter(x)
    for layer in layers:
        x = layer.encode(x, masks)
    x = masks.leave(x)
    return x[0] if src.dim() == 2 else x.transpose(0, 1) if transposed else x
