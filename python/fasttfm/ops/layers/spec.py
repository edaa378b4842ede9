"""What a transformer layer computes, as plain data without tensors.

    pre-LN    z1 = z + dropout(attention(x)),   y1 = norm_a(z1)      z' = z1 + dropout(mlp(y1)),   y = norm_b(z')
    post-LN   y1 = norm_a(x + dropout(attention(x)))                 y = norm_b(y1 + dropout(mlp(y1)))

In a pre-LN model x is already normalized, z is the residual stream, and norm_b is the next layer's first norm or the
model's last: every residual addition directly precedes a norm. The parameters are ``FIELDS``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from fasttfm.ops.layers.transformer_block import BlockParameters

FIELDS = (*BlockParameters._fields, "q_norm_weight", "k_norm_weight")  # the last two are [head_dim]


@dataclass(frozen=True)
class Norm:
    kind: str  # "layer" for LayerNorm, "rms" for RMSNorm
    eps: float


@dataclass(frozen=True)
class Attention:
    """Self-attention over packed sequences. Queries, keys and values are one projection, in this order of heads."""

    heads: int
    kv_heads: int  # a divisor of heads
    head_dim: int
    window_left: int = -1  # keys before a query that it attends to, -1 for all
    window_right: int = -1
    rotary: int | None = None  # the index of the tables that rotate queries and keys
    rotary_columns: int = 0  # of a head that are rotated
    scale: float | None = None  # of the scores; 1 / sqrt(head_dim) by default
    dropout: float = 0.0  # of the weights
    head_norm_eps: float | None = None  # of RMSNorm over each head of q and k, before they are rotated; None for none

    @property
    def columns(self) -> int:
        """Columns of the projection's output."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def is_causal_or_full(self) -> bool:
        return (self.window_left, self.window_right) in ((-1, -1), (-1, 0))


@dataclass(frozen=True)
class FeedForward:
    columns: int  # of down's input
    activation: str  # a value of ops.ACTIVATIONS
    gated: bool = False  # up computes [gate, up], and down's input is activation(gate) * up


@dataclass(frozen=True)
class Adapter:
    """LoRA of a linear layer (``lora.py``): y += (x A^T) B^T, by blocks of y's columns."""

    linear: str  # qkv, out, up or down
    rank: int
    outputs: int  # columns of y
    blocks: tuple[tuple[int, int], ...]  # the columns of y that have an A and a B each: the first, and the one after
    selected: bool = False  # whether each token has an adapter of its own, or none

    @property
    def columns(self) -> int:
        """Columns of x A^T."""
        return self.rank * len(self.blocks)


@dataclass(frozen=True)
class LayerSpec:
    width: int
    pre_norm: bool
    attention: Attention
    feed_forward: FeedForward
    norm_a: Norm
    norm_b: Norm
    present: frozenset[str]  # the FIELDS that are not None
    dropout_a: float = 0.0  # of the attention block's output
    dropout_b: float = 0.0  # of the feed-forward block's output
    # What the backward computes again instead of keeping it: "y1", and "a", down's input, if it has no gate.
    recomputed: frozenset[str] = frozenset()
    adapters: tuple[Adapter, ...] = ()  # at most one for each linear layer

    def adapter(self, linear: str) -> Adapter | None:
        return next((adapter for adapter in self.adapters if adapter.linear == linear), None)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters."""
        width, inner = self.width, self.feed_forward.columns
        up = inner * (2 if self.feed_forward.gated else 1)
        attended = self.attention.heads * self.attention.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "qkv_weight": (self.attention.columns, width),
            "qkv_bias": (self.attention.columns,),
            "out_weight": (width, attended),
            "out_bias": (width,),
            "norm_a_weight": (width,),
            "norm_a_bias": (width,),
            "up_weight": (up, width),
            "up_bias": (up,),
            "down_weight": (width, inner),
            "down_bias": (width,),
            "norm_b_weight": (width,),
            "norm_b_bias": (width,),
            "q_norm_weight": (self.attention.head_dim,),
            "k_norm_weight": (self.attention.head_dim,),
        }
        return {name: shape for name, shape in shapes.items() if name in self.present}

    @property
    def drops(self) -> bool:
        """Whether some elements are dropped, so that seeds are needed."""
        return bool(self.dropout_a or self.dropout_b or self.attention.dropout)

    @property
    def is_block(self) -> bool:
        """Whether it is a layer of ``transformer_block``."""
        if self.adapters:
            return False
        attention, norms = self.attention, (self.norm_a.kind, self.norm_b.kind)
        plain = attention.rotary is None and attention.scale is None and attention.head_norm_eps is None
        whole = attention.heads == attention.kv_heads and attention.heads * attention.head_dim == self.width
        return plain and whole and norms == ("layer", "layer") and not self.feed_forward.gated


class Specs(tuple[LayerSpec, ...]):
    """Layers whose plans are looked up by the identity of this tuple, because the hash of many layers takes long."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__

    @classmethod
    def of(cls, layers: Iterable[LayerSpec]) -> Specs:
        """The same object for the same layers."""
        return _specs_of(tuple(layers))

    @functools.cached_property
    def are_blocks(self) -> bool:
        """Whether all are layers of ``transformer_block``."""
        return all(spec.is_block for spec in self.kinds)

    @functools.cached_property
    def drop(self) -> bool:
        """Whether some elements are dropped, so that seeds are needed."""
        return any(spec.drops for spec in self.kinds)

    @functools.cached_property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """Different layers, each once."""
        return tuple(dict.fromkeys(self))

    @functools.cached_property
    def singles(self) -> tuple[Specs, ...]:
        """Each layer by itself."""
        return tuple(Specs.of([layer]) for layer in self)

    @functools.cached_property
    def without_last(self) -> Specs:
        return Specs.of(self[:-1])


@functools.lru_cache(maxsize=1024)
def _specs_of(layers: tuple[LayerSpec, ...]) -> Specs:
    return Specs(layers)
