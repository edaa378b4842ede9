"""``TransformerEncoderLayer``: torch.nn's module on top of the fused ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fasttfm import ops
from fasttfm.nn.masks import Arguments, Masks
from fasttfm.nn.multihead_attention import self_attention
from fasttfm.nn.residual import add_norm, add_then_norm, norm

_NAME = "TransformerEncoderLayer"
_ARGUMENTS = Arguments(_NAME, "src_mask", "src_key_padding_mask")


class TransformerEncoderLayer(torch.nn.TransformerEncoderLayer):
    """Drop-in for ``torch.nn.TransformerEncoderLayer``: same arguments, same state_dict, same numbers.

    The activation is ReLU, GELU in either form or SiLU; others are refused by name. Masks are those of
    ``fasttfm.nn.MultiheadAttention``. Dropout draws other random numbers than torch's. Under autocast the output has
    autocast's type, where torch's is fp32.
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
        kind = _activation_name(activation)
        sizes = (d_model, nhead, dim_feedforward, dropout)
        super().__init__(*sizes, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype)
        self.activation_name = kind

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        return run_layers(_ARGUMENTS, [self], src, src_mask, src_key_padding_mask, causal=is_causal)

    def encode(self, x: Tensor, masks: Masks) -> Tensor:
        """The layer for ``x`` [B, S, C] in the masks' order.

        The bias of a block's last product, the dropout behind it and the residual connection are done in the pass of
        the LayerNorm that follows.
        """
        projection, p = self.self_attn.out_proj, self._rate(self.dropout1)
        if self.norm_first:
            context = self_attention(self.self_attn, norm(self.norm1, x), masks)
            branch = functional.linear(context, projection.weight)
            y, z = add_then_norm(self.norm2, branch, x, linear_bias=projection.bias, p=p)
            return z + functional.dropout(self._feed_forward(y, self.linear2.bias), self.dropout2.p, self.training)
        branch = functional.linear(self_attention(self.self_attn, x, masks), projection.weight)
        x = add_norm(self.norm1, branch, x, linear_bias=projection.bias, p=p)
        branch = self._feed_forward(x, None)
        return add_norm(self.norm2, branch, x, linear_bias=self.linear2.bias, p=self._rate(self.dropout2))

    def _feed_forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        first, second = self.linear1, self.linear2
        if self._rate(self.dropout) == 0:
            return ops.mlp(x, first.weight, first.bias, second.weight, bias, activation=self.activation_name)
        inner = ops.linear_gelu(x, first.weight, first.bias, activation=self.activation_name)
        return functional.linear(functional.dropout(inner, self.dropout.p), second.weight, bias)

    def _rate(self, dropout: torch.nn.Dropout) -> float:
        return dropout.p if self.training else 0.0


def run_layers(
    arguments: Arguments,
    layers: list[TransformerEncoderLayer],
    src: Tensor,
    mask: Tensor | None,
    ignored: Tensor | None,
    *,
    causal: bool,
) -> Tensor:
    """Runs layers over ``src`` [S, B, C], [B, S, C] or [S, C]. Tokens enter the masks' order once."""
    if src.is_nested or src.dim() not in (2, 3):
        got = "a nested tensor" if src.is_nested else f"shape {tuple(src.shape)}"
        raise ValueError(f"{arguments.module}: src: expected two or three dimensions, got {got}")
    attention = layers[0].self_attn
    transposed = src.dim() == 3 and not attention.batch_first
    x = src[None] if src.dim() == 2 else src.transpose(0, 1) if transposed else src
    masks = arguments.resolve(attention.num_heads, x, x, mask, ignored, causal=causal)
    x = masks.enter(x)
    for layer in layers:
        x = layer.encode(x, masks)
    x = masks.leave(x)
    return x[0] if src.dim() == 2 else x.transpose(0, 1) if transposed else x


def _activation_name(activation: Any) -> str:
    """An activation as ops know it, from torch's name, function or module."""
    if isinstance(activation, torch.nn.GELU):
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    known: dict[Any, str] = {
        "relu": "relu",
        "gelu": "gelu",
        functional.relu: "relu",
        torch.relu: "relu",
        functional.gelu: "gelu",
        functional.silu: "silu",
        torch.nn.ReLU: "relu",
        torch.nn.SiLU: "silu",
    }
    found = known.get(activation) or known.get(type(activation))
    if found is None:
        expected = "relu, gelu or silu, as torch's name, function or module"
        raise ValueError(f"{_NAME}: activation: expected {expected} (others are not supported), got {activation!r}")
    return found
