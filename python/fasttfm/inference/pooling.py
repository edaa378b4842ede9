"""Turns the hidden states of packed tokens into one vector per text: which layers are used, how tokens are pooled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.ops.pack import sequence_means


@dataclass(frozen=True)
class Tokens:
    """The packed tokens to pool. Pooling does not synchronize with the host, so a CUDA graph can contain it.

    Args:
        x: [T, C]. Vectors are fp32, whatever its dtype.
        cu_seqlens: int32 [texts + 1].
        max_seqlen: An upper bound of the number of tokens of a text.
        skipped: The number of tokens at the beginning of each text that are not pooled (those of a prompt).
    """

    x: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    skipped: int = 0

    def lengths(self) -> Tensor:
        """int32 [texts]: the number of pooled tokens of each text."""
        return (self.cu_seqlens.diff() - self.skipped).clamp(min=0)

    def numbers(self) -> Tensor:
        """int32 [texts, S, 1]: the positions of pooled tokens in their texts, counted from 1; 0 for other tokens and
        after the end of a text."""
        numbers = torch.arange(1, self.max_seqlen + 1, dtype=torch.int32, device=self.x.device)
        taken = (numbers > self.skipped) & (numbers <= self.cu_seqlens.diff()[:, None])
        return (numbers * taken)[..., None]

    def padded(self, fill: float = 0.0) -> Tensor:
        """[texts, S, C]: the pooled tokens, ``fill`` elsewhere."""
        x = ops.unpack(self.x, self.cu_seqlens, self.max_seqlen)
        return x if fill == 0 and not self.skipped else torch.where(self.numbers() > 0, x, fill)


def _mean(tokens: Tokens) -> Tensor:
    return sequence_means(tokens.x, tokens.cu_seqlens, tokens.max_seqlen, skipped=tokens.skipped)


def _mean_sqrt(tokens: Tokens) -> Tensor:
    return _mean(tokens) * tokens.lengths().sqrt()[:, None]


def _weighted(tokens: Tokens) -> Tensor:
    weights = tokens.numbers().float()
    return (tokens.padded() * weights).sum(1) / weights.sum(1).clamp(min=1)


def _max(tokens: Tokens) -> Tensor:
    largest = tokens.padded(-math.inf).amax(1).float()
    return largest.where(tokens.lengths()[:, None] > 0, 0.0)


def _first(tokens: Tokens) -> Tensor:
    shift = tokens.skipped * (tokens.lengths() > 0)
    return _rows(tokens, tokens.cu_seqlens[:-1] + shift)


def _last(tokens: Tokens) -> Tensor:
    return _rows(tokens, tokens.cu_seqlens[1:] - 1)


def _rows(tokens: Tokens, rows: Tensor) -> Tensor:
    """The given row of each text. Texts without tokens, which pad the batch of a CUDA graph, get some other row."""
    return tokens.x.index_select(0, rows.clamp(0, max(0, len(tokens.x) - 1))).float()


POOLING: dict[str, Callable[[Tokens], Tensor]] = {
    "mean": _mean,
    "first": _first,
    "last": _last,
    "max": _max,
    "mean-sqrt": _mean_sqrt,
    "weighted": _weighted,
}
SPLADE = "splade"  # of logits instead of states: sparse.largest_logits
PADDED = frozenset(("max", "weighted"))  # those that pad the sequences of a batch
SENTENCE_POOLING = {  # the names of sentence-transformers
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean-sqrt",
    "weightedmean": "weighted",
    "lasttoken": "last",
}


def pooling_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """Reads ``"mean"`` or ``"mean,max"`` (whose vectors are concatenated) as keys of ``POOLING`` or ``SPLADE``;
    sentence-transformers' names, such as ``"cls"``, are those of the same pooling."""
    listed = value.split(",") if isinstance(value, str) else value
    names = tuple(SENTENCE_POOLING.get(name, name) for name in listed)
    if not names or any(name not in POOLING and name != SPLADE for name in names):
        raise ValueError(f"pooling: expected {', '.join((*POOLING, SPLADE))}, or several of them, got {value!r}")
    return names


# ---- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layers:
    """Which hidden states are used, and how they are combined. ``Layers.of`` reads the command line's notation.

    Args:
        first, end: The states are ``states[first:end]`` of the list that begins with the output of the embeddings, as
            transformers' ``hidden_states``. Negative numbers count from the last layer.
        joined: ``"concat"``, ``"sum"``, ``"mean"`` or ``"weights"``.
        weights: For ``"weights"``, one weight for each of these states, in their order.
    """

    first: int = -1
    end: int | None = None
    joined: str = "concat"
    weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, value: Any) -> Layers:
        """``last``, ``second-to-last``, ``embeddings``, ``concat:4``, ``sum:4``, ``mean:4``, ``weights:0.1,0.3,0.6``; a
        number N is ``concat:N``. ``all`` instead of a number means the embeddings and all layers."""
        if isinstance(value, Layers):
            return value
        kind, _, rest = str(value).partition(":")
        if kind in _SINGLE and not rest:
            return _SINGLE[kind]
        try:
            if kind == "weights":
                weights = tuple(float(weight) for weight in rest.split(","))
                if all(math.isfinite(weight) for weight in weights):
                    return cls(-len(weights), None, kind, weights)
            elif kind in ("concat", "sum", "mean") and rest == "all":
                return cls(0, None, kind)
            elif kind in ("concat", "sum", "mean") or not rest:
                count = int(rest or kind)
                if count >= 1:
                    return cls(-count, None, kind if rest else "concat")
        except ValueError:
            pass
        forms = "last, second-to-last, embeddings, concat:N, sum:N, mean:N (N may be all) or weights:W,W,..."
        raise ValueError(f"layers: expected {forms}, got {value!r}")

    def check(self, depth: int) -> None:
        """Raises ValueError if a model with ``depth`` layers has too few."""
        if -self.first > depth:
            raise ValueError(f"layers: expected 1 to the model's {depth}, got {-self.first}")

    def widths(self, depth: int) -> int:
        """The width of the combined states of a model with ``depth`` layers, as a multiple of the model's width."""
        return len(range(depth + 1)[self.first : self.end]) if self.joined == "concat" else 1

    def join(self, states: Sequence[Tensor]) -> Tensor:
        """Combines the states [T, C] of the embeddings and of all layers to fp32 [T, C * widths]."""
        chosen = states[self.first : self.end]
        if self.joined == "concat":
            return torch.cat([state.float() for state in chosen], -1)
        weights = self.weights or [1 / len(chosen) if self.joined == "mean" else 1.0] * len(chosen)
        return sum(weight * state.float() for weight, state in zip(weights, chosen, strict=True))  # type: ignore[return-value]


_SINGLE = {"last": Layers(), "second-to-last": Layers(-2, -1), "embeddings": Layers(0, 1)}
