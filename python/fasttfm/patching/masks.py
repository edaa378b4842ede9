"""Masks as transformers' models hand them to attention, in the three forms that fasttfm's attention reads.

    None                nothing is padding
    int32 [B]           padding after the tokens: how many tokens each sequence has
    bool [B, Sk]        padding anywhere
    [B, 1, Sq, Sk]      anything else (windows, packed documents, static caches): explicit, boolean or to be added

Whether attention is causal says the module that calls it, as for transformers' other implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from fasttfm.nn import PackedBatch


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **others: Any,
) -> Tensor | None:
    """transformers' mask interface, called once for all layers.

    It inspects the mask, which synchronizes with the GPU once per forward pass, as transformers' sdpa does. Without a
    mask, and while a graph is traced or captured, nothing is synchronized.
    """
    causal = mask_function is masking_utils.causal_mask_function
    known = causal or mask_function is masking_utils.bidirectional_mask_function
    offsets = isinstance(q_offset, (int, torch.SymInt)) and isinstance(kv_offset, (int, torch.SymInt))
    simple = known and not use_vmap and offsets and kv_offset == 0
    simple = simple and (not causal or q_offset + q_length == kv_length)
    simple = simple and (attention_mask is None or attention_mask.shape[-1] == kv_length)
    if not simple:
        others |= {"use_vmap": use_vmap, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        explicit: Tensor = masking_utils.sdpa_mask(*sizes, mask_function, attention_mask, **others)
        return explicit
    if attention_mask is None or masking_utils.is_tracing(attention_mask):  # its values cannot be looked at
        return attention_mask
    batch = PackedBatch.from_mask(attention_mask)
    if batch.is_full:
        return None
    in_front = batch.indices is None and (not causal or q_length == kv_length)
    mask = batch.cu_seqlens.diff() if in_front else attention_mask[:]  # a tensor of this forward pass only
    setattr(mask, _LAYOUT, batch)  # the mask's values are known on the host from here on
    return mask


_LAYOUT = "_fasttfm_layout"


def layout_of(mask: Tensor | None, x: Tensor) -> PackedBatch:
    """The tokens of a batch ``x`` [B, S, ...], from ``create_mask``'s lengths [B] or mask [B, S]."""
    if mask is None:
        return PackedBatch.full(x[..., 0])
    known: PackedBatch | None = getattr(mask, _LAYOUT, None)
    if known is not None:
        return known
    if mask.dim() == 1:
        mask = torch.arange(x.shape[1], device=mask.device) < mask[:, None]
    return PackedBatch.from_mask(mask)


def is_explicit(mask: Tensor | None) -> bool:
    return mask is not None and mask.dim() == 4


def as_explicit(mask: Tensor | None, causal: bool, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Any form as a mask that broadcasts to [B, H, Sq, Sk]: boolean, true where a query attends to a key."""
    if mask is not None and mask.dim() == 4:
        return mask
    explicit = None
    if mask is not None:
        tokens = torch.arange(keys, device=device) < mask[:, None] if mask.dim() == 1 else mask
        explicit = tokens[:, None, None, :]
    if causal and queries > 1:
        below = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        explicit = below if explicit is None else explicit & below
    return explicit
