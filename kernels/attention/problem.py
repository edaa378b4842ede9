"""The options of an attention call, without its tensors q, k and v; shared by every Python backend.

Letters, here and in the backends: B batch, S sequence, T packed tokens, H heads of q, Hk heads of k and v, D head dim;
Lq and Lk are a sequence's own numbers of queries and keys.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fasttfm.kernels.common import philox

UNLIMITED = -1


class AttentionProblem(NamedTuple):
    """Query i of a sequence is at key position ``i + Lk - Lq``: the last query is aligned with the last key. It attends
    to the keys from ``window_left`` before that position to ``window_right`` after it; causal attention has a
    ``window_right`` of 0.

    Dense tensors ([B, S, H, D]) may come with ``lengths``, packed ones ([T, H, D]) always come with ``cu_seqlens``. The
    registered ops take the fields in this order: their schemas are made of them.
    """

    cu_seqlens: Tensor | None = None  # int32 [sequences + 1]: first token of each packed sequence, and their number
    cu_seqlens_k: Tensor | None = None  # None where it is cu_seqlens
    lengths: Tensor | None = None  # int32 [B]: Lq of each dense sequence
    lengths_k: Tensor | None = None  # None where it is lengths
    bias: Tensor | None = None  # [1 or B, 1 or H, >= max_seqlen, >= max_seqlen_k], added to the scaled scores
    alibi_slopes: Tensor | None = None  # fp32 [H]: -slope * distance is added to the scaled scores
    seed: Tensor | None = None  # int64 [1]; None means no dropout
    max_seqlen: int = 0  # at least the longest Lq; S when dense
    max_seqlen_k: int = 0
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    scale: float = 1.0
    p: float = 0.0  # of dropout

    def sequences(self, q: Tensor) -> int:
        return q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def key_cu_seqlens(self) -> Tensor | None:
        return self.cu_seqlens if self.cu_seqlens_k is None else self.cu_seqlens_k

    @property
    def key_lengths(self) -> Tensor | None:
        return self.lengths if self.lengths_k is None else self.lengths_k

    @property
    def threshold(self) -> int:
        return philox.threshold(self.p)

    @property
    def dropout_scale(self) -> float:
        return philox.scale(philox.threshold(self.p))

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None


def of_sequences(bias: Tensor | None) -> Tensor | None:
    """A bias [H, Sq, Sk], which all sequences share, as [1, H, Sq, Sk]."""
    return bias[None] if bias is not None and bias.dim() == 3 else bias


def window_bounds(causal: bool, window: tuple[int | None, int | None] | None) -> tuple[int, int]:
    """``window_left`` and ``window_right`` of the public arguments, where None and UNLIMITED both mean no limit."""
    left, right = window or (None, None)
    return UNLIMITED if left is None else left, 0 if causal else UNLIMITED if right is None else right
