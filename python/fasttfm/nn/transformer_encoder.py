"""``TransformerEncoder``: torch.nn's module on top of the fused ops."""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.nn.masks import Arguments
from fasttfm.nn.transformer_encoder_layer import TransformerEncoderLayer, run_layers

_NAME = "TransformerEncoder"
_ARGUMENTS = Arguments(_NAME, "mask", "src_key_padding_mask")


class TransformerEncoder(torch.nn.TransformerEncoder):
    """Drop-in for ``torch.nn.TransformerEncoder`` over ``fasttfm.nn.TransformerEncoderLayer``.

    Masks are those of ``fasttfm.nn.MultiheadAttention``, dealt with once for all layers. ``is_causal=None`` does not
    look for a causal mask, for that would wait for a GPU: say ``True`` where ``mask`` is one. There are no nested
    tensors: ``enable_nested_tensor`` and ``mask_check`` change nothing.
    """

    def __init__(
        self,
        encoder_layer: TransformerEncoderLayer,
        num_layers: int,
        norm: torch.nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        if not isinstance(encoder_layer, TransformerEncoderLayer):
            got = f"{type(encoder_layer).__module__}.{type(encoder_layer).__qualname__}"
            raise TypeError(f"{_NAME}: encoder_layer: expected a fasttfm.nn.TransformerEncoderLayer, got {got}")
        super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor=False, mask_check=mask_check)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        layers = [layer for layer in self.layers if isinstance(layer, TransformerEncoderLayer)]
        x = run_layers(_ARGUMENTS, layers, src, mask, src_key_padding_mask, causal=bool(is_causal))
        return x if self.norm is None else self.norm(x)
