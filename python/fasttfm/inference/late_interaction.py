"""A vector for each token of a text (ColBERT): how texts are read, and which of their tokens have vectors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fasttfm import ops
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.inference.batches import SortedIds
from fasttfm.inference.formats import Format, Tokens
from fasttfm.inference.results import TokenRows, Wait
from fasttfm.nn.parts import layer_norm
from fasttfm.nn.rotary_layer import RotaryLayer


@dataclass(frozen=True)
class Side:
    """How queries are read, or documents.

    Args:
        marker: A token after the first special token, such as ``"[Q] "``; a text if the vocabulary does not have it.
        prompt: A text that is put in front of each text.
        length: The maximum number of tokens; by default the session's.
    """

    marker: str = ""
    prompt: str = ""
    length: int | None = None


@dataclass(frozen=True)
class LateInteraction:
    """How a text becomes a vector for each token. Folders of ColBERT, PyLate, sentence-transformers and bge-m3 state
    it.

    Args:
        projection: Modules from a token's state to its vector, before the vector is divided by its norm.
        query, document: How each side is read.
        expansion: The number of tokens that queries are padded to with ``fill``, which have vectors, too; None for no
            padding.
        fill: The token of the expansion; by default the mask token.
        attends: Whether tokens attend to those of the expansion, which attend to the others in any case.
        skipped: Words without vectors in documents, such as punctuation.
        dropped: How many tokens at the beginning of a text have no vector.
        normalize: Whether vectors are divided by their norms.
    """

    projection: tuple[nn.Module, ...] = ()
    query: Side = field(default_factory=Side)
    document: Side = field(default_factory=Side)
    expansion: int | None = None
    fill: str | None = None
    attends: bool = False
    skipped: Sequence[str] = ()
    dropped: int = 0
    normalize: bool = True

    def fill_id(self, tokenizer: Tokenizer | None) -> int | None:
        """The id of the expansion's tokens; None without an expansion."""
        if self.expansion is None or tokenizer is None:
            return None
        id = tokenizer.special.mask if self.fill is None else tokenizer.backend.token_to_id(self.fill)
        if id is None:
            raise ValueError(f"late interaction: fill: expected a token of the vocabulary, got {self.fill!r}")
        return int(id)

    def skipped_ids(self, tokenizer: Tokenizer | None) -> list[int]:
        """The ids of ``skipped``; words that are no single tokens are left out."""
        if tokenizer is None:
            return []
        ids = [tokenizer.backend.token_to_id(word) for word in self.skipped]
        return [id for id in ids if id is not None and id != tokenizer.special.unk]

    def form(self, form: Format, tokenizer: Tokenizer, *, query: bool) -> Format:
        """The format of queries, or of documents; ``form`` is the model's."""
        side = self.query if query else self.document
        marker = _marker(tokenizer, side.marker)
        length = min(form.max_length, side.length or form.max_length)
        fill = None
        if query and self.expansion is not None:
            length, fill = min(form.max_length, self.expansion), self.fill_id(tokenizer)
        least = len(form.first) + len(marker) + len(form.last) + 1
        if length < least:
            raise ValueError(f"late interaction: length: expected at least {least} tokens, got {length}")
        return MarkedFormat([*form.first, *marker], form.between, form.last, length, form.segments, fill=fill)


def _marker(tokenizer: Tokenizer, marker: str) -> list[int]:
    for name in (marker, marker.strip()):
        id = tokenizer.backend.token_to_id(name) if name else None
        if id is not None and id != tokenizer.special.unk:
            return [id]
    return tokenizer.encode(marker) if marker else []


@dataclass(frozen=True)
class MarkedFormat(Format):
    """The format of one side, whose ``first`` tokens end with its marker. With ``fill``, texts are padded with it to
    ``max_length``."""

    fill: int | None = None

    def one(self, text: Sequence[int]) -> Tokens:
        tokens = super().one(text)
        if self.fill is None:
            return tokens
        ids = [*tokens.ids, *[self.fill] * (self.max_length - len(tokens.ids))]
        return Tokens(ids, [0] * len(ids), tokens.cut)

    def two(self, text: Sequence[int], other: Sequence[int]) -> Tokens:
        raise ValueError("Session: inputs: expected single texts for a vector of each token, got a pair")


class ProjectedTokens(nn.Module):
    """The vectors of states [T, C], in fp32."""

    def __init__(self, settings: LateInteraction) -> None:
        super().__init__()
        self.projection, self.normalizes = nn.Sequential(*settings.projection), settings.normalize

    def forward(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.projection(x.float())
        return nn.functional.normalize(vectors, dim=-1) if self.normalizes else vectors


class KeptTokenRows(TokenRows):
    """The rows of tokens that have vectors.

    Args:
        ids, count, empty_shape: Those of ``TokenRows``.
        dropped: How many tokens at the beginning of a sequence have none.
        skipped: Ids of tokens that have none.
    """

    def __init__(
        self,
        ids: SortedIds,
        count: int,
        empty_shape: Callable[[], tuple[int, ...]],
        *,
        dropped: int,
        skipped: Sequence[int],
    ) -> None:
        super().__init__(ids, count, empty_shape)
        self._dropped, self._skipped = dropped, np.array(skipped, np.int64)

    def add(self, first: int, last: int, wait: Wait) -> None:
        super().add(first, last, wait)
        ends = self._ids.cu_seqlens
        for number in range(first, last):
            ids = self._ids.ids[ends.item(number) : ends.item(number + 1)]
            kept = ~np.isin(ids, self._skipped)
            kept[: self._dropped] = False
            if not kept.all():
                index = self._ids.order.item(number)
                rows = self._rows[index]
                assert rows is not None
                self._rows[index] = rows[kept]


# ---- queries with tokens that no other token attends to --------------------------------------------------------------


@dataclass(frozen=True)
class Keys:
    """The rows of a packed batch that tokens attend to."""

    rows: Tensor  # int64 [n]
    cu_seqlens: Tensor  # int32 [sequences + 1]

    @classmethod
    def before_fill(cls, ids: Tensor, cu_seqlens: Tensor, fill: int) -> Keys:
        """All rows but those with the id ``fill`` at the end of a sequence."""
        lengths = cu_seqlens.diff().long()
        owner = torch.repeat_interleave(lengths, output_size=len(ids))
        places = torch.arange(len(ids), device=ids.device)
        zeros = torch.zeros(len(lengths), dtype=torch.int64, device=ids.device)
        ends = zeros.scatter_reduce(0, owner, torch.where(ids == fill, 0, places + 1), "amax")
        kept = places < ends.index_select(0, owner)
        counts = zeros.scatter_add(0, owner, kept.long())
        boundaries = torch.cat([zeros[:1], counts.cumsum(0)]).to(torch.int32)
        return cls(kept.nonzero().squeeze(1), boundaries)


class KeysOnly(nn.Module):
    """The layers of an encoder, in which all tokens attend to ``keys`` only."""

    def __init__(self, encoder: Any, keys: Keys) -> None:
        super().__init__()
        self._encoder, self._keys = [encoder], keys  # a list: not a module of this one

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        hidden_states: Any = None,
        positions: Any = None,
        **inputs: Any,
    ) -> Tensor:
        encoder: Any = self._encoder[0]
        if inputs or hidden_states is not None or positions is not None:
            got = ", ".join(inputs) or "states of several layers, or positions"
            raise ValueError(f"late interaction: attends: expected True for layers with more inputs, got {got}")
        layers = encoder.in_order()
        norms = [layer.norm1 if layer.norm_first else None for layer in layers] + [encoder.final_norm]
        residual: Tensor | None = None
        if layers and layers[0].norm_first:
            residual, x = x, x if norms[0] is None else layer_norm(norms[0], x)
        for layer, following in zip(layers, norms[1:], strict=True):
            x, residual = self._layer(encoder, layer, (x, residual), following, cu_seqlens, max_seqlen)
        return x

    def _layer(
        self, encoder: Any, layer: Any, streams: tuple[Tensor, Tensor | None], following: Any, *sizes: Any
    ) -> tuple[Tensor, Tensor | None]:
        x, residual = streams
        cu_seqlens, max_seqlen = sizes
        if any(0 <= reach < max_seqlen - 1 for reach in layer.window):
            raise ValueError(
                f"late interaction: attends: expected True for layers whose window {layer.window} is shorter than "
                f"queries, got queries of {max_seqlen} tokens"
            )
        if isinstance(layer, RotaryLayer):
            positions = ops.position_ids_from_cu_seqlens(cu_seqlens, total=len(x))
            parts = layer.attention_inputs(x, encoder.tables(x, max_seqlen), positions)
        else:
            parts = (layer.project(x),)
        q, k, v = parts if len(parts) == 3 else parts[0].unbind(1)
        k, v = (tensor.index_select(0, self._keys.rows) for tensor in (k, v))
        context = ops.attention(
            q.contiguous(), k, v, cu_seqlens=cu_seqlens, cu_seqlens_k=self._keys.cu_seqlens, max_seqlen=max_seqlen
        )
        norms = (layer.norm2, following) if layer.norm_first else (layer.norm1, layer.norm2)
        stream = x if residual is None else residual
        states: tuple[Tensor, Tensor | None] = layer._after_attention(
            context, stream, cu_seqlens, norms, (0.0, 0.0, 0.0), None
        )
        return states


def attending_to(model: Any, keys: Keys) -> Any:
    """A base model with the same modules, whose tokens attend to ``keys`` only."""
    shallow = copy.copy(model)
    shallow._modules = {**model._modules, "encoder": KeysOnly(model.encoder, keys)}
    return shallow
