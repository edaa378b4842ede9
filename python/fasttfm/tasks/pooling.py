"""From the hidden states of packed tokens to one vector for each text: which layers, and how tokens are pooled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """The tokens that are pooled, packed.

    Args:
        x: fp32 [T, C].
        cu_seqlens: int64 [texts + 1].
        skipped: The number of tokens at the beginning of each text that take no part (those of a prompt).
    """

    x: Tensor
    cu_seqlens: Tensor
    skipped: int = 0

    def lengths(self) -> Tensor:
        """int64 [texts]: the tokens of each text that take part."""
        return (self.cu_seqlens.diff() - self.skipped).clamp(min=0)

    def taken(self) -> tuple[Tensor, Tensor, Tensor]:
        """The rows that take part, their numbers within their texts, counted from 1, and their texts' offsets."""
        sizes = self.cu_seqlens.diff()
        numbers = torch.arange(1, len(self.x) + 1, device=self.x.device)
        numbers = numbers - self.cu_seqlens[:-1].repeat_interleave(sizes)
        offsets = torch.cat([sizes.new_zeros(1), self.lengths().cumsum(0)])
        kept = (numbers > self.skipped).nonzero().squeeze(1) if self.skipped else slice(None)
        return self.x[kept], numbers[kept], offsets


def _sum(tokens: Tokens) -> Tensor:
    rows, _, offsets = tokens.taken()
    total: Tensor = torch.segment_reduce(rows, "sum", offsets=offsets)
    return total


def _mean(tokens: Tokens) -> Tensor:
    return _sum(tokens) / tokens.lengths().clamp(min=1)[:, None]


def _mean_sqrt(tokens: Tokens) -> Tensor:
    return _sum(tokens) / tokens.lengths().clamp(min=1).sqrt()[:, None]


def _weighted(tokens: Tokens) -> Tensor:
    rows, numbers, offsets = tokens.taken()
    weights = numbers[:, None].float()
    total: Tensor = torch.segment_reduce(rows * weights, "sum", offsets=offsets)
    return total / torch.segment_reduce(weights, "sum", offsets=offsets).clamp(min=1)


def _max(tokens: Tokens) -> Tensor:
    rows, _, offsets = tokens.taken()
    largest: Tensor = torch.segment_reduce(rows, "max", offsets=offsets, initial=-math.inf)
    return largest.where(tokens.lengths()[:, None] > 0, 0.0)


def _first(tokens: Tokens) -> Tensor:
    shift = tokens.skipped * (tokens.lengths() > 0)
    return tokens.x.index_select(0, tokens.cu_seqlens[:-1] + shift)


def _last(tokens: Tokens) -> Tensor:
    return tokens.x.index_select(0, tokens.cu_seqlens[1:] - 1)


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
