"""From the hidden states of packed tokens to one vector for each text: which layers, and how tokens are pooled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttfm import ops


@dataclass(frozen=True)
class Tokens:
    """The tokens that are pooled, packed. Nothing is read on the host, so that pooling can be part of a CUDA graph.

    Args:
        x: fp32 [T, C].
        cu_seqlens: int32 [texts + 1].
        max_seqlen: No text has more tokens.
        skipped: The number of tokens at the beginning of each text that take no part (those of a prompt).
    """

    x: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    skipped: int = 0

    def lengths(self) -> Tensor:
        """int32 [texts]: the tokens of each text that take part."""
        return (self.cu_seqlens.diff() - self.skipped).clamp(min=0)

    def numbers(self) -> Tensor:
        """int32 [texts, S, 1]: the numbers of tokens within their texts, counted from 1; 0 for those that take no
        part, and after a text's end."""
        numbers = torch.arange(1, self.max_seqlen + 1, dtype=torch.int32, device=self.x.device)
        taken = (numbers > self.skipped) & (numbers <= self.cu_seqlens.diff()[:, None])
        return (numbers * taken)[..., None]

    def padded(self, fill: float = 0.0) -> Tensor:
        """[texts, S, C]: the tokens that take part, ``fill`` elsewhere."""
        x = ops.unpack(self.x, self.cu_seqlens, self.max_seqlen)
        return x if fill == 0 and not self.skipped else torch.where(self.numbers() > 0, x, fill)


def _sum(tokens: Tokens) -> Tensor:
    return tokens.padded().sum(1)


def _mean(tokens: Tokens) -> Tensor:
    return _sum(tokens) / tokens.lengths().clamp(min=1)[:, None]


def _mean_sqrt(tokens: Tokens) -> Tensor:
    return _sum(tokens) / tokens.lengths().clamp(min=1).sqrt()[:, None]


def _weighted(tokens: Tokens) -> Tensor:
    weights = tokens.numbers().float()
    return (tokens.padded() * weights).sum(1) / weights.sum(1).clamp(min=1)


def _max(tokens: Tokens) -> Tensor:
    largest = tokens.padded(-math.inf).amax(1)
    return largest.where(tokens.lengths()[:, None] > 0, 0.0)


def _first(tokens: Tokens) -> Tensor:
    shift = tokens.skipped * (tokens.lengths() > 0)
    return _rows(tokens, tokens.cu_seqlens[:-1] + shift)


def _last(tokens: Tokens) -> Tensor:
    return _rows(tokens, tokens.cu_seqlens[1:] - 1)


def _rows(tokens: Tokens, rows: Tensor) -> Tensor:
    """A row of each text; a text without tokens, as those that fill up a graph's batch, has another's."""
    return tokens.x.index_select(0, rows.clamp(0, max(0, len(tokens.x) - 1)))


# By name; the second names are those of sentence-transformers.
POOLING: dict[str, Callable[[Tokens], Tensor]] = {
    "mean": _mean,
    "first": _first,
    "last": _last,
    "max": _max,
    "mean-sqrt": _mean_sqrt,
    "weighted": _weighted,
}
SENTENCE_POOLING = {
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean-sqrt",
    "weightedmean": "weighted",
    "lasttoken": "last",
}


def pooling_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """``"mean"`` or ``"mean,max"``, whose vectors are concatenated, as names out of ``POOLING``."""
    names = tuple(value.split(",")) if isinstance(value, str) else tuple(value)
    if not names or any(name not in POOLING for name in names):
        raise ValueError(f"pooling: expected {', '.join(POOLING)}, or several of them, got {value!r}")
    return names


# ---- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """Which layers' hidden states make a vector, and how. ``Layers.of`` reads one as the command line writes it.

    Args:
        last: The number of last layers that are joined.
        joined: ``"concat"``, ``"sum"``, ``"mean"`` or ``"weights"``.
        weights: For ``"weights"``, one for each of these layers, the last layer's last.
        skipped: The number of layers at the end that are left out.
    """

    last: int = 1
    joined: str = "concat"
    weights: tuple[float, ...] = ()
    skipped: int = 0

    @classmethod
    def of(cls, value: Any) -> Layers:
        """``last``, ``second-to-last``, ``concat:4``, ``sum:4``, ``mean:4``, ``weights:0.1,0.3,0.6``; a number N is
        ``concat:N``."""
        if isinstance(value, Layers):
            return value
        kind, _, rest = str(value).partition(":")
        if kind in ("last", "second-to-last") and not rest:
            return cls(skipped=int(kind != "last"))
        try:
            if kind == "weights":
                weights = tuple(float(weight) for weight in rest.split(","))
                if all(math.isfinite(weight) for weight in weights):
                    return cls(len(weights), kind, weights)
            elif kind in ("concat", "sum", "mean") or not rest:
                count = int(rest or kind)
                if count >= 1:
                    return cls(count, kind if rest else "concat")
        except ValueError:
            pass
        forms = "last, second-to-last, concat:N, sum:N, mean:N or weights:W,W,..."
        raise ValueError(f"layers: expected {forms}, got {value!r}")

    def check(self, depth: int) -> None:
        """Raises ValueError if a model of ``depth`` layers has no such ones."""
        if not 1 <= self.last + self.skipped <= depth:
            raise ValueError(f"layers: expected 1 to the model's {depth}, got {self.last + self.skipped}")

    @property
    def widths(self) -> int:
        """A vector's width, in widths of the model."""
        return self.last if self.joined == "concat" else 1

    def join(self, states: Sequence[Tensor]) -> Tensor:
        """fp32 [T, C * widths] of all layers' states [T, C]."""
        chosen = states[len(states) - self.last - self.skipped : len(states) - self.skipped]
        if self.joined == "concat":
            return torch.cat([state.float() for state in chosen], -1)
        weights = self.weights or [1 / self.last if self.joined == "mean" else 1.0] * self.last
        return sum(weight * state.float() for weight, state in zip(weights, chosen, strict=True))  # type: ignore[return-value]
