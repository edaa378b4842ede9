"""What disentangled attention's backends take in addition to q, k and v; the registered ops have it in this order.

Letters, here and in the backends: B batch, S sequence, T packed tokens, H heads, D head dim, R rows of a table.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Problem(NamedTuple):
    position_keys: Tensor | None  # [R, H, D]
    position_queries: Tensor | None
    key_bias: Tensor | None  # [T, H], or [B, S, H] of dense tensors
    segment_bias: Tensor | None  # of the same shape
    distance_rows: Tensor  # int32 [2 L - 1]
    segments: Tensor | None  # int32 [T] or [B, S], next to segment_bias
    cu_seqlens: Tensor | None  # int32 [sequences + 1], of packed tensors
    mask: Tensor | None  # bool [B, S], of dense ones
    seed: Tensor | None  # int64 [1]; None means no dropout
    max_seqlen: int  # at least the longest sequence; S when dense
    scale: float
    p: float  # of dropout
