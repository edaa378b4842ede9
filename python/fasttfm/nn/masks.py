"""torch.nn's masks as arguments of ``ops.attention``. Nothing here synchronizes with the GPU.

A mask on a GPU cannot be inspected without a synchronization, so no mask is assumed to be padding at the end of
sequences. Attention does not depend on the order of the keys: the tokens of every sequence are moved to its front, in
their order, and their number is a length. That supports any mask, including padding at the front and gaps, with a
cumulative sum on the device and one pass over the rows in each direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Compaction:
    """Moves the tokens of each of B sequences to its front and those that a mask ignores after them, both in order."""

    targets: Tensor  # int64 [B * S]: the row of [B * S] that each row moves to
    sources: Tensor  # int64 [B * S]: the inverse permutation
    lengths: Tensor  # int32 [B]: the number of tokens of each sequence

    @staticmethod
    def of(ignored: Tensor) -> Compaction:
        """The compaction for a mask [B, S] that is true for padding."""
        batch, sequence = ignored.shape
        tokens = ~ignored
        lengths = tokens.sum(1, keepdim=True)
        columns = torch.where(tokens, tokens.cumsum(1), lengths + ignored.cumsum(1)) - 1
        first_rows = torch.arange(batch, device=ignored.device)[:, None] * sequence
        targets = (columns + first_rows).flatten()
        rows = torch.arange(batch * sequence, device=ignored.device)
        return Compaction(targets, torch.empty_like(rows).scatter_(0, targets, rows), lengths.squeeze(1).int())

    def apply(self, x: Tensor) -> Tensor:
        """``x`` [B, S, ...] with the tokens of each sequence in front."""
        return x.flatten(0, 1).index_select(0, self.sources).view(x.shape)

    def undo(self, x: Tensor) -> Tensor:
        """``x`` [B, S, ...] in the order of the mask again."""
        return x.flatten(0, 1).index_select(0, self.targets).view(x.shape)


@dataclass(frozen=True)
class Masks:
    """A call's masks, as arguments of attention."""

    causal: bool = False
    compaction: Compaction | None = None
    bias: Tensor | None = None  # [H, Sq, Sk]

    def enter(self, x: Tensor) -> Tensor:
        return x if self.compaction is None else self.compaction.apply(x)

    def leave(self, x: Tensor) -> Tensor:
        return x if self.compaction is None else self.compaction.undo(x)

    def options(self) -> dict[str, Any]:
        """``ops.attention``'s arguments, for queries and keys in the masks' order.

        Only causal attention gets the queries' lengths too: the positions of queries and keys agree only for tokens.
        """
        lengths = None if self.compaction is None else self.compaction.lengths
        return {"causal": self.causal, "lengths" if self.causal else "lengths_k": lengths, "bias": self.bias}


@dataclass(frozen=True)
class Arguments:
    """The module's names of its masks, for error messages."""

    module: str
    attention: str
    padding: str

    def resolve(self, heads: int, query: Tensor, key: Tensor, mask: Any, ignored: Any, *, causal: bool) -> Masks:
        """The masks of a call with query [B, Sq, C] and key [B, Sk, C]."""
        queries, keys = query.shape[1], key.shape[1]
        if causal:
            if queries != keys:
                raise ValueError(
                    f"{self.module}: is_causal: expected as many queries as keys, got {queries} and {keys}"
                )
            mask = None  # is_causal says that it is the causal mask
        bias = _bias(f"{self.module}: {self.attention}", mask, (heads, queries, keys), query.dtype)
        compaction = _compaction(f"{self.module}: {self.padding}", ignored, key)
        if bias is not None and compaction is not None:
            expected = f"None together with {self.padding} (is_causal=True means a causal mask)"
            raise ValueError(f"{self.module}: {self.attention}: expected {expected}, got a tensor")
        return Masks(causal, compaction, bias)


def _compaction(argument: str, mask: Any, key: Tensor) -> Compaction | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{argument}: expected a boolean mask (numbers to add are not supported), got {got}")
    if mask.dim() == 1 and key.shape[0] == 1:
        mask = mask[None]  # the call has no batch dimension
    if mask.shape != key.shape[:2]:
        raise ValueError(f"{argument}: expected shape {tuple(key.shape[:2])}, got {tuple(mask.shape)}")
    return Compaction.of(mask)


def _bias(argument: str, mask: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor | None:
    """A mask [Sq, Sk], boolean (true excludes) or added to the scores, as a bias for every head."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != torch.Size(shape[1:]):
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        expected = f"shape {shape[1:]}, for all sequences and heads (others are not supported)"
        raise ValueError(f"{argument}: expected {expected}, got {got}")
    return additive(mask, dtype).expand(shape)


def additive(mask: Any, dtype: torch.dtype) -> Any:
    """Converts a boolean mask (true excludes) to numbers to add to scores; returns other masks and None unchanged."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, float("-inf"))
