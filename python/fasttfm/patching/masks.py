"""The masks that transformers' models pass to fasttfm's attention.

    None                no padding
    int32 [B]           padding at the end: the number of tokens of each sequence
    bool [B, Sk]        padding anywhere
    int32 [1, 1, N + 1] rows that pack N sequences without padding: their boundaries in the B * S tokens
    [B, 1, Sq, Sk]      anything else (windows, static caches): explicit, boolean or additive

The number of dimensions tells them apart, never the dtype: a user's mask [B, S] may have any dtype.
The module that calls attention says whether it is causal, as for transformers' other implementations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from fasttfm.nn import PackedBatch


class Pattern(NamedTuple):
    """What a mask function of transformers does in addition to padding, if all its parts are known."""

    causal: bool
    window: bool  # whether there is a sliding window, whose size attention gets from the module that calls it
    sequences: Tensor | None  # [B, S]: a number that the tokens of one packed sequence share


def pattern_of(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function; None if a part of it is unknown, or if a traced graph would depend on it."""
    if (
        mask_function is masking_utils.causal_mask_function
        or mask_function is masking_utils.bidirectional_mask_function
    ):
        return Pattern(mask_function is masking_utils.causal_mask_function, window=False, sequences=None)
    if torch.compiler.is_compiling():
        return None
    causal, window, sequences = False, False, None
    for part in _parts(mask_function):
        name = part.__qualname__.partition(".")[0]
        if part is masking_utils.causal_mask_function:
            causal = True
        elif name in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
            window = True
        elif name == "packed_sequence_mask_function":
            (sequences,) = _captured(part)
        elif part is not masking_utils.bidirectional_mask_function:
            return None
    return Pattern(causal, window, sequences)


def _parts(mask_function: Callable[..., Any]) -> list[Any]:
    """The functions that ``masking_utils.and_masks`` has combined."""
    if getattr(mask_function, "__qualname__", "").startswith("and_masks."):
        return [part for members in _captured(mask_function) for each in members for part in _parts(each)]
    return [mask_function]


def _captured(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    *,
    windows: bool = False,
    **others: Any,
) -> Tensor | None:
    """transformers' mask interface, called once for all layers. With ``windows`` the mask does not include sliding
    windows, whose size attention gets as an argument.

    It inspects the mask, which synchronizes with the GPU once per forward pass, as transformers' sdpa does. Without a
    mask, and while a graph is traced or captured, nothing is synchronized.
    """
    pattern = pattern_of(mask_function)
    offsets = isinstance(q_offset, (int, torch.SymInt)) and isinstance(kv_offset, (int, torch.SymInt))
    simple = pattern is not None and (windows or not pattern.window) and not use_vmap and offsets and kv_offset == 0
    causal = pattern is not None and pattern.causal
    simple = simple and (not causal or q_offset + q_length == kv_length)
    padding = attention_mask is None or (attention_mask.dim() == 2 and attention_mask.shape[1] == kv_length)
    simple = simple and padding
    sequences = None if pattern is None else pattern.sequences
    simple = simple and (sequences is None or (attention_mask is None and not masking_utils.is_tracing(sequences)))
    if not simple:
        others |= {"use_vmap": use_vmap, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        explicit: Tensor = masking_utils.sdpa_mask(*sizes, mask_function, attention_mask, **others)
        return explicit
    if sequences is not None:
        return boundaries_of(sequences)
    if attention_mask is None or masking_utils.is_tracing(attention_mask):  # its values cannot be read
        return attention_mask
    batch = PackedBatch.from_mask(attention_mask)
    if batch.is_full:
        return None
    in_front = batch.indices is None and (not causal or q_length == kv_length)
    mask = batch.cu_seqlens.diff() if in_front else attention_mask[:]  # a tensor of this forward pass only
    setattr(mask, _LAYOUT, batch)  # the mask's values are known on the host from here on
    return mask


_LAYOUT = "_fasttfm_layout"


def boundaries_of(sequences: Tensor) -> Tensor:
    """The mask of rows [B, S] that pack several sequences; adjacent sequences have different numbers."""
    batch, length = sequences.shape
    first = torch.ones_like(sequences, dtype=torch.bool)
    first[:, 1:] = sequences.diff(dim=1) != 0
    starts = first.flatten().nonzero().squeeze(1)
    boundaries = torch.nn.functional.pad(starts, (0, 1), value=batch * length).int()
    longest = int(boundaries.diff().max()) if boundaries.numel() > 1 else 0
    mask = boundaries[None, None]
    setattr(mask, _LAYOUT, PackedBatch(boundaries, longest, batch * length, (batch, length)))
    return mask


def is_packed(mask: Tensor | None) -> bool:
    """Whether a mask is the boundaries of sequences that share rows."""
    return mask is not None and mask.dim() == 3


def layout_of(mask: Tensor | None, x: Tensor) -> PackedBatch:
    """The tokens of a batch ``x`` [B, S, ...], from ``create_mask``'s lengths [B], mask [B, S] or boundaries."""
    if mask is None:
        return PackedBatch.full(x[..., 0])
    known: PackedBatch | None = getattr(mask, _LAYOUT, None)
    if known is not None:
        return known
    if is_packed(mask):
        batch, length = x.shape[:2]
        return PackedBatch(mask[0, 0], batch * length, batch * length, (batch, length))
    if mask.dim() == 1:
        mask = torch.arange(x.shape[1], device=mask.device) < mask[:, None]
    return PackedBatch.from_mask(mask)


def is_explicit(mask: Tensor | None) -> bool:
    return mask is not None and mask.dim() == 4


def as_explicit(
    mask: Tensor | None,
    causal: bool,
    queries: int,
    keys: int,
    device: torch.device,
    window: tuple[int, int] = (-1, -1),
) -> Tensor | None:
    """Converts any form to a boolean mask that broadcasts to [B, H, Sq, Sk], true where a query attends to a key."""
    if mask is not None and mask.dim() == 4:
        return mask
    explicit = None
    if mask is not None and is_packed(mask):
        boundaries = mask[0, 0]
        tokens = torch.arange(int(boundaries[-1]), device=device, dtype=torch.int32)
        sequence = torch.searchsorted(boundaries[1:].contiguous(), tokens, right=True).view(-1, queries)
        explicit = (sequence[:, :, None] == sequence[:, None, :])[:, None]
    elif mask is not None:
        tokens = torch.arange(keys, device=device) < mask[:, None] if mask.dim() == 1 else mask.bool()
        explicit = tokens[:, None, None, :]
    left, right = window
    right = 0 if causal and queries > 1 else right
    if left >= 0 or right >= 0:
        ahead = torch.arange(keys, device=device) - torch.arange(keys - queries, keys, device=device)[:, None]
        near = (ahead >= (-left if left >= 0 else -keys)) & (ahead <= (right if right >= 0 else keys))
        explicit = near if explicit is None else explicit & near
    return explicit
