"""Attention of one new token of each sequence to a KV cache, in plain torch: the specification.

The caches are [B, room, Hk, D]. If sequence b has L = lengths[b] tokens in the cache, the new token is at position L:

    key_cache[b, L] = k[b],  value_cache[b, L] = v[b]
    out[b, h] = sum over j of softmax_j(scale * q[b, h] key_cache[b, j, g]) value_cache[b, j, g],   g = h // (H / Hk)

j runs from max(0, L - left) to L; ``left`` < 0 means no limit. Lengths outside of [0, room) are clamped. Where all
scores are -inf, out is 0, as in attention. Arithmetic is fp32 (fp64 for fp64 input).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasttfm.kernels.common.linear import accumulate, without_autocast


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    left: int,
    scale: float,
) -> Tensor:
    """Returns only ``out``: the new keys and values are appended to copies of the caches."""
    return _attend(q, _appended(key_cache, k, lengths), _appended(value_cache, v, lengths), lengths, left, scale)


def append(cache: Tensor, new: Tensor, lengths: Tensor) -> None:
    """Writes ``new`` [B, Hk, D] into row ``lengths`` of each sequence's cache."""
    cache[torch.arange(len(cache), device=cache.device), last_row(cache, lengths)] = new.to(cache.dtype)


def last_row(cache: Tensor, lengths: Tensor) -> Tensor:
    """The row of each sequence's new token: int64 [B]."""
    return lengths.clamp(0, cache.shape[1] - 1).long()


def _appended(cache: Tensor, new: Tensor, lengths: Tensor) -> Tensor:
    here = torch.arange(cache.shape[1], device=cache.device) == last_row(cache, lengths)[:, None]
    return torch.where(here[:, :, None, None], new[:, None], cache)


def _attend(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, left: int, scale: float) -> Tensor:
    batch, heads, width = q.shape
    groups = keys.shape[2]
    grouped = accumulate(q).reshape(batch, groups, heads // groups, width)
    positions = torch.arange(keys.shape[1], device=q.device)
    last = last_row(keys, lengths)[:, None]
    seen = positions <= last
    if left >= 0:
        seen = seen & (positions >= last - left)
    seen = seen[:, None, None, :]
    with without_autocast(grouped):
        scores = torch.einsum("bghd,btgd->bght", grouped, accumulate(keys)) * scale
        scores = scores.masked_fill(~seen, float("-inf"))
        nothing = (scores == float("-inf")).all(-1, keepdim=True)
        weights = torch.where(nothing, 0.0, scores.softmax(-1))
        read = accumulate(values).masked_fill(~seen[:, 0, 0, :, None, None], 0.0)  # unused rows may be NaN
        out = torch.einsum("bght,btgd->bghd", weights, read)
    return out.reshape(batch, heads, width).to(q.dtype)
