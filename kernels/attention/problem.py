"""The options of an attention call, without its tensors q, k and v; shared by every Python backend.

Letters, here and in the backends: B batch, S sequence, T packed tokens, H heads of q, Hk heads of k and v, D head dim;
Lq and Lk are a sequence's own numbers of queries and keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

UNLIMITED = -1


class AttentionProblem(NamedTuple):
    """Query i of a sequence is at key position ``i + Lk - Lq``: both ends are aligned. It attends to the keys from
    ``window_left`` before that position to ``window_right`` after it; causal attention has ``window_right`` 0.

    Dense tensors ([B, S, H, D]) may come with ``lengths``, packed ones ([T, H, D]) always come with ``cu_seqlens``.
    """

    sequences: int
    max_seqlen: int  # at least the longest Lq; S when dense
    max_seqlen_k: int
    scale: float
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    cu_seqlens: Tensor | None = None  # int32 [sequences + 1]: first token of each packed sequence, and their number
    cu_seqlens_k: Tensor | None = None
    lengths: Tensor | None = None  # int32 [B]: Lq of each dense sequence
    lengths_k: Tensor | None = None
    bias: Tensor | None = None  # [1 or B, 1 or H, >= max_seqlen, >= max_seqlen_k], added to the scaled scores
    alibi_slopes: Tensor | None = None  # fp32 [H]: -slope * distance is added to the scaled scores
    seed: Tensor | None = None  # int64 [1]; None means no dropout
    threshold: int = 0  # philox.threshold(p)
    dropout_scale: float = 1.0  # philox.scale(threshold)

    def schema_options(self, p: float) -> tuple[Any, ...]:
        """The same as the registered ops take it, but the backend's name. Boundaries and lengths of keys are None where
        they are those of queries."""
        cu_seqlens_k = None if self.cu_seqlens_k is self.cu_seqlens else self.cu_seqlens_k
        lengths_k = None if self.lengths_k is self.lengths else self.lengths_k
        tensors = (self.cu_seqlens, cu_seqlens_k, self.lengths, lengths_k, self.bias, self.alibi_slopes, self.seed)
        numbers = (self.max_seqlen, self.max_seqlen_k, self.window_left, self.window_right, self.scale, p)
        return *tensors, *numbers

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
