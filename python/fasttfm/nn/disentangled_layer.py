"""``DisentangledLayer``: a transformer layer of DeBERTa, whose attention reads contents and distances separately.

``ShiftedLayer`` is XLNet's, in which only queries read distances.
"""

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
from fasttfm.nn.parts import layer_norm, linear_activation, linear_layer, product
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
    segments: Tensor | None = None  # [T], of models whose attention reads them (XLNet)


class DisentangledLayer(PackedLayer):
    """A post-LN ``PackedLayer`` whose attention also compares queries and keys with distances. Its arguments are
    ``PackedLayer``'s and ``distances``."""

    def __init__(self, width: int, heads: int, intermediate: int, *, distances: Distances, **options: Any) -> None:
        super().__init__(width, heads, intermediate, **options)
        self.distances = distances
        has_projections = distances.used and not distances.shared
        self.position_key = nn.Linear(width, width) if has_projections and distances.content_to_position else None
        self.position_query = nn.Linear(width, width) if has_projections and distances.position_to_content else None

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
        inputs: dict[str, Any] = self.token_inputs(heads, relative)
        if batch.columns() is None:
            return ops.disentangled_attention(**inputs, distance_rows=relative.rows, **packed, **options)
        there = batch.unpack(torch.ones(len(heads), dtype=torch.bool, device=heads.device))
        inputs = {name: batch.unpack(x) for name, x in inputs.items()}
        return batch.pack(ops.disentangled_attention(**inputs, distance_rows=relative.rows, mask=there, **options))

    def token_inputs(self, heads: Tensor, relative: Relative) -> dict[str, Tensor]:
        """The arguments of ``ops.disentangled_attention`` with a row for each token, of queries, keys and values
        [..., 3, H, D]."""
        return dict(zip("qkv", heads.unbind(-3), strict=True))

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
        projections = (self.position_key, self.position_query)
        keys, queries = (None if projection is None else linear_layer(projection, table) for projection in projections)
        heads = (-1, (self.heads, self.width // self.heads))
        return None if keys is None else keys.unflatten(*heads), None if queries is None else queries.unflatten(*heads)

    def bias(self, inputs: dict[str, Tensor], relative: Relative) -> Tensor:
        """What distances and segments add to the scores, [sequences, H, S, S], of ``token_inputs``."""
        batch, longest = relative.batch, len(relative.rows) // 2 + 1
        columns, every = batch.columns(), torch.arange(batch.max_seqlen, device=relative.rows.device)
        places = every[None] if columns is None else ops.unpack(columns, batch.cu_seqlens, batch.max_seqlen)
        rows = relative.rows[places[..., :, None] - places[..., None, :] + (longest - 1)][:, None]
        inputs = {name: ops.unpack(x, batch.cu_seqlens, batch.max_seqlen) for name, x in inputs.items()}
        return self.padded_bias(inputs, rows, relative).contiguous()

    def padded_bias(self, inputs: dict[str, Tensor], rows: Tensor, relative: Relative) -> Tensor:
        """``bias`` of inputs [B, S, ...], with the table's row of each query and key [1 or B, 1, S, S]."""
        assert relative.table is not None
        position_key, position_query = self.position_heads(relative.table)
        q, k, total = inputs["q"], inputs["k"], torch.zeros((), dtype=inputs["q"].dtype, device=rows.device)
        if position_key is not None:
            scores = torch.einsum("bihd,rhd->bhir", q, position_key)
            total = total + scores.gather(-1, rows.expand(*scores.shape[:-1], -1))
        if position_query is not None:
            scores = torch.einsum("bjhd,rhd->bhjr", k, position_query)
            total = total + scores.gather(-1, rows.mT.expand(*scores.shape[:-1], -1)).mT
        if "key_bias" in inputs:
            total = total + inputs["key_bias"].mT[:, :, None]
        if "segment_bias" in inputs:
            segments = inputs["segments"]
            others = (segments[:, :, None] != segments[:, None, :])[:, None]
            total = total + inputs["segment_bias"].mT[..., None] * others
        biases: Tensor = total * self.scale
        return biases

    def attention_weights(
        self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, relative: Relative | None = None
    ) -> Tensor:
        heads = self.project(x)
        options: dict[str, Any] = {"scale": self.scale, "cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        if relative is None or relative.table is None or not self.distances.terms:
            q, k, _ = heads.unbind(-3)
            return ops.attention_weights(q, k, **options)
        inputs = self.token_inputs(heads, relative)
        return ops.attention_weights(inputs["q"], inputs["k"], bias=self.bias(inputs, relative), **options)

    def is_fusable(self, next_norm: nn.Module | None = None) -> bool:
        """False: the layer is several ops."""
        return False


class ShiftedLayer(DisentangledLayer):
    """A layer of XLNet (Transformer-XL's attention, with segments). Of query i, key j and the sinusoids r of distances,

        s_ij = ((q_i + b_w) k_j + (q_i + b_r) R r_(i-j) + [g_i != g_j] (q_i + b_s) (e_1 - e_0)) / sqrt(D)

    but for a term that is the same for all keys of a query. It has no biases but those of its feed-forward block, which
    also has dropout inside. Arguments are ``PackedLayer``'s."""

    def __init__(self, width: int, heads: int, intermediate: int, **options: Any) -> None:
        distances = Distances(1, None, position_to_content=False)
        super().__init__(width, heads, intermediate, distances=distances, qkv_bias=False, **options)
        self.out = nn.Linear(width, width, bias=False)
        self.position_key = nn.Linear(width, width, bias=False)
        of_heads = (heads, width // heads)
        self.content_bias, self.position_bias, self.segment_bias = (
            nn.Parameter(self.out.weight.new_zeros(of_heads)) for _ in range(3)
        )
        self.segment = nn.Parameter(self.out.weight.new_zeros(2, *of_heads))

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.width // self.heads)

    def token_inputs(self, heads: Tensor, relative: Relative) -> dict[str, Tensor]:
        """Queries have the bias of distances; what that of contents adds to it is a bias of keys."""
        (heads, content, position, segment, table) = linear.autocast(
            heads, self.content_bias, self.position_bias, self.segment_bias, self.segment
        )
        q, k, v = heads.unbind(-3)
        inputs = {"q": q + position, "k": k, "v": v}
        inputs["key_bias"] = torch.einsum("...hd,hd->...h", k, content - position)
        if relative.segments is not None:
            other = table[1] - table[0]
            inputs["segment_bias"] = torch.einsum("...hd,hd->...h", q + segment, other)
            inputs["segments"] = relative.segments
        return inputs

    def position_heads(self, table: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The keys [2 S - 1, H, D] of distances, of their sinusoids [2 S - 1, C]."""
        return linear_layer(self.position_key, table).unflatten(-1, (self.heads, -1)), None

    def feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden = linear_activation(self.up, self.activation, x)
        return product(self.down, functional.dropout(hidden, self.dropout, self.training))


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
        out = self.conv(padded.mT).mT
        out = batch.pack(out) if batch.shape is not None else ops.pack(out, batch.cu_seqlens, total=batch.tokens)
        return layer_norm(self.norm, y + self.function(functional.dropout(out, self.dropout, self.training)))


class ConvolvedLayer(DisentangledLayer):
    """DeBERTa's first layer, with a convolution of its input."""

    convolution: Convolution

    def forward(self, x: Tensor, *layout: Any, relative: Relative | None = None, **options: Any) -> Any:
        y, _ = super().forward(x, *layout, relative=relative, **options)
        assert relative is not None
        return self.convolution(x, y, relative.batch), None
