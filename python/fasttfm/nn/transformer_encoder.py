"""``TransformerEncoder``: torch.nn's module on top of the fused ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.nn.masks import Arguments
from fasttfm.nn.plain import is_plain
from fasttfm.nn.transformer_encoder_layer import TransformerEncoderLayer, check_source, run_layers

_NAME = "TransformerEncoder"
_ARGUMENTS = Arguments(_NAME, "mask", "src_key_padding_mask")


class TransformerEncoder(torch.nn.TransformerEncoder):
    """Drop-in for ``torch.nn.TransformerEncoder`` over ``fasttfm.nn.TransformerEncoderLayer``.

    Masks are those of ``fasttfm.nn.MultiheadAttention``, processed once for all layers. ``is_causal=None`` does not
    detect a causal mask, because that would synchronize with the GPU: pass ``True`` if ``mask`` is one. There are no
    nested tensors: ``enable_nested_tensor`` and ``mask_check`` change nothing. If a layer is not plain (a subclass,
    hooks, torch.compile or checkpoint_wrapper around it, LoRA in it), layers are called one by one, as torch calls
    them.
    """

    def __init__(
        self,
        encoder_layer: torch.nn.Module,
        num_layers: int,
        norm: torch.nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        if not any(isinstance(module, TransformerEncoderLayer) for module in encoder_layer.modules()):
            got = f"{type(encoder_layer).__module__}.{type(encoder_layer).__qualname__}"
            raise TypeError(f"{_NAME}: encoder_layer: expected a fasttfm.nn.TransformerEncoderLayer, got {got}")
        layer: Any = encoder_layer
        super().__init__(layer, num_layers, norm, enable_nested_tensor=False, mask_check=mask_check)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        check_source(_ARGUMENTS, src)
        layers: Any = list(self.layers)
        if _share_their_masks(layers):
            x = run_layers(_ARGUMENTS, layers, src, mask, src_key_padding_mask, causal=bool(is_causal))
        else:
            masks = {"src_mask": mask, "src_key_padding_mask": src_key_padding_mask, "is_causal": bool(is_causal)}
            x = src
            for layer in layers:
                x = layer(x, **masks)
        return x if self.norm is None else self.norm(x)


def _share_their_masks(layers: list[Any]) -> bool:
    """Whether layers are plain and alike, so that tokens can stay in the masks' order from the first to the last
    layer."""
    if not layers or not is_plain(*layers):
        return False
    first = layers[0].self_attn
    heads, batch_first = first.num_heads, first.batch_first
    return all(layer.self_attn.num_heads == heads and layer.self_attn.batch_first == batch_first for layer in layers)
