"""Layers over packed tokens: padding is removed before the first and restored, as zeros, after the last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.nn import PackedBatch
from fasttfm.patching.attention import captured
from fasttfm.patching.parts import Patched


class PackedLayers(Patched):
    """A stack of layers whose forward takes ``hidden_states`` and ``attention_mask``.

    Layers see a batch of one row with all tokens, [1, T, C], and attention gets the sequence boundaries by the
    arguments that transformers has for that. Padding stays if the hidden states of each layer are requested, if a graph
    is compiled (its shapes would depend on the mask's values), or if a mask is more than padding.
    """

    does = "padding: removed before the layers; its rows are 0 after them"

    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        forward = super().forward  # type: ignore[misc]
        if _as_it_comes(hidden_states, attention_mask, args, kwargs):
            return forward(hidden_states, attention_mask, *args, **kwargs)
        batch = _layout(attention_mask, hidden_states)
        boundaries = {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
        bounds = {"max_length_q": batch.max_seqlen, "max_length_k": batch.max_seqlen}
        output = forward(batch.pack(hidden_states)[None], None, **kwargs, **boundaries, **bounds)
        output.last_hidden_state = batch.unpack(output.last_hidden_state[0])
        return output


_DECODERS = ("encoder_hidden_states", "past_key_values", "use_cache", "cu_seq_lens_q")


def _as_it_comes(x: Tensor, mask: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is no padding to remove, or none can be removed."""
    if mask is None or mask.dim() > 2 or mask.shape[0] != x.shape[0] or torch.compiler.is_compiling():
        return True
    if any(each is not None for each in args) or any(kwargs.get(name) not in (None, False) for name in _DECODERS):
        return True
    return captured("hidden_states") or captured("attentions")


def _layout(mask: Any, x: Tensor) -> PackedBatch:
    """The tokens of a batch [B, S], from their numbers [B] or a mask [B, S]."""
    batch, sequence = x.shape[:2]
    if mask.dim() == 2:
        tokens = int(mask.sum())
        indices = ops.token_indices_from_mask(mask, total=tokens)
        return PackedBatch(ops.cu_seqlens_from_mask(mask), sequence, tokens, (batch, sequence), indices)
    return PackedBatch(ops.cu_seqlens_from_lengths(mask), sequence, int(mask.sum()), (batch, sequence))
