"""``DisentangledLayer``: a transformer layer of DeBERTa, whose attention reads contents and distances separately."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm import ops
from fasttfm.nn.packed_batch import PackedBatch
from fasttfm.nn.packed_layer import PackedLayer, draw_seeds
from fasttfm.nn.parts import layer_norm, linear_layer
from fasttfm.ops import linear

# The activations of convolutions and poolers, in plain torch.
FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"gelu": functional.gelu, "relu": functional.relu, "tanh": torch.tanh}
)


@dataclass(frozen=True)
class Distances:
    """What attention reads of the distance i - j of query i and key j.

    Args:
        span: The table of distances has 2 span rows: row span is that of distance 0.
        farthest: Rows further than span / 2 from there are those of logarithmic ranges up to this distance; None for
            one row for each distance.
        content_to_position: Whether queries are compared with distances.
        position_to_content: Whether keys are.
        used: Whether there is a table at all; without one the scores only have the scale of both.
        shared: Whether the table is projected by the layer's own projections of keys and queries.
    """

    span: int
    farthest: int | None
    content_to_position: bool = True
    position_to_content: bool = True
    used: bool = True
    shared: bool = False

    @property
    def terms(self) -> int:
        return self.content_to_position + self.position_to_content


class Relative(NamedTuple):
    """The distances of a batch, for all layers."""

    batch: PackedBatch
    table: Tensor | None  # [2 span, C]
    rows: Tensor  # int32 [2 S - 1]: the row of the table for each distance from 1 - S to S - 1


class DisentangledLayer(PackedLayer):
    """A post-LN ``PackedLayer`` whose attention also compares queries and keys with distances. Its arguments are
    ``PackedLayer``'s and ``distances``."""

    def __init__(self, width: int, heads: int, intermediate: int, *, distances: Distances, **options: Any) -> None:
        super().__init__(width, heads, intermediate, **options)
        self.distances = distances
        own = distances.used and not distances.shared
        self.position_key = nn.Linear(width, width) if own and distances.content_to_position else None
        self.position_query = nn.Linear(width, width) if own and distances.position_to_content else None

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        residual: Tensor | None = None,
        next_norm: nn.LayerNorm | None = None,
        seeds: Tensor | None = None,
        relative: Relative | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the layer. Arguments and results are those of ``PackedLayer``; ``relative`` has the distances."""
        (x,) = linear.autocast(x)
        self.check(x, cu_seqlens, residual, next_norm)
        rates = self.rates()
        seeds = None if not any(rates) else draw_seeds(x.device) if seeds is None else seeds
        context = self.attend(self.project(x), relative, cu_seqlens, max_seqlen, rates[0], seeds)
        return self._after_attention(context, x, cu_seqlens, (self.norm1, self.norm2), rates, seeds)

    def attend(
        self,
        heads: Tensor,
        relative: Relative | None,
        cu_seqlens: Tensor,
        max_seqlen: int,
        dropout: float,
        seeds: Tensor | None,
    ) -> Tensor:
        """The output of attention [T, H, D], of queries, keys and values [T, 3, H, D]."""
        packed: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        options: dict[str, Any] = {"scale": self.scale, "dropout_p": dropout}
        options["seed"] = None if seeds is None else seeds[:1]
        if relative is None or relative.table is None or not self.distances.terms:
            context = ops.attention(heads, **packed, **options)
            assert isinstance(context, Tensor)
            return context
        options["position_keys"], options["position_queries"] = self.position_heads(relative.table)
        batch = relative.batch
        if batch.columns() is None:
            q, k, v = heads.unbind(1)
            return ops.disentangled_attention(q, k, v, relative.rows, **packed, **options)
        there = batch.unpack(torch.ones(len(heads), dtype=torch.bool, device=heads.device))
        q, k, v = batch.unpack(heads).unbind(2)
        return batch.pack(ops.disentangled_attention(q, k, v, relative.rows, mask=there, **options))

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.width // self.heads * (1 + self.distances.terms))

    def position_heads(self, table: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The keys and queries [2 span, H, D] of distances, from their table [2 span, C]."""
        distances = self.distances
        table = functional.dropout(table, self.dropout, self.training)
        if distances.shared:
            query, key, _ = self.project(table).unbind(1)
            return key if distances.content_to_position else None, query if distances.position_to_content else None
        own = (self.position_key, self.position_query)
        keys, queries = (None if each is None else linear_layer(each, table) for each in own)
        heads = (-1, (self.heads, self.width // self.heads))
        return None if keys is None else keys.unflatten(*heads), None if queries is None else queries.unflatten(*heads)

    def bias(self, heads: Tensor, relative: Relative | None) -> Tensor | None:
        """What distances add to the scores, [sequences, H, S, S], of queries, keys and values [T, 3, H, D]."""
        if relative is None or relative.table is None or not self.distances.terms:
            return None
        position_key, position_query = self.position_heads(relative.table)
        batch, longest = relative.batch, len(relative.rows) // 2 + 1
        columns, every = batch.columns(), torch.arange(batch.max_seqlen, device=heads.device)
        places = every[None] if columns is None else ops.unpack(columns, batch.cu_seqlens, batch.max_seqlen)
        rows = relative.rows[places[..., :, None] - places[..., None, :] + (longest - 1)][:, None]
        q, k, _ = ops.unpack(heads, batch.cu_seqlens, batch.max_seqlen).unbind(2)
        total: Any = 0
        if position_key is not None:
            scores = torch.einsum("bihd,rhd->bhir", q, position_key)
            total = total + scores.gather(-1, rows.expand(*scores.shape[:-1], -1))
        if position_query is not None:
            scores = torch.einsum("bjhd,rhd->bhjr", k, position_query)
            total = total + scores.gather(-1, rows.mT.expand(*scores.shape[:-1], -1)).mT
        found: Tensor = (total * self.scale).contiguous()
        return found

    def attention_weights(
        self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, relative: Relative | None = None
    ) -> Tensor:
        heads = self.project(x)
        q, k, _ = heads.unbind(-3)
        options: dict[str, Any] = {"bias": self.bias(heads, relative), "scale": self.scale}
        return ops.attention_weights(q, k, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, **options)

    def is_fusable(self, next_norm: nn.Module | None = None) -> bool:
        """False: the layer is several ops."""
        return False


class Convolution(nn.Module):
    """``norm(y + activation(dropout(conv(x))))`` of a layer's input x and output y; conv reads neighbouring tokens."""

    def __init__(self, width: int, kernel: int, groups: int, activation: str, dropout: float, eps: float) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, kernel, padding=(kernel - 1) // 2, groups=groups)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.function, self.dropout = FUNCTIONS[activation], dropout

    def forward(self, x: Tensor, y: Tensor, batch: PackedBatch) -> Tensor:
        """[T, C]. A neighbour that is padding, or outside of the sequence, counts as 0."""
        padded = batch.unpack(x) if batch.shape is not None else ops.unpack(x, batch.cu_seqlens, batch.max_seqlen)
        found = self.conv(padded.mT).mT
        found = batch.pack(found) if batch.shape is not None else ops.pack(found, batch.cu_seqlens, total=batch.tokens)
        return layer_norm(self.norm, y + self.function(functional.dropout(found, self.dropout, self.training)))


class ConvolvedLayer(DisentangledLayer):
    """DeBERTa's first layer, with a convolution of its input."""

    convolution: Convolution

    def forward(self, x: Tensor, *layout: Any, relative: Relative | None = None, **options: Any) -> Any:
        y, _ = super().forward(x, *layout, relative=relative, **options)
        assert relative is not None
        return self.convolution(x, y, relative.batch), None
