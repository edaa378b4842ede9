"""``Embeddings``: the embedding layer of a transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fasttfm import ops
from fasttfm.nn.parts import layer_norm
from fasttfm.nn.plain import is_plain


class Embeddings(nn.Module):
    """Token, position and segment embeddings, LayerNorm and dropout in one pass; a table or a LayerNorm that is not
    plain (plain.py) is called as a module.

    Args:
        vocabulary: Rows of the word table.
        width: C.
        positions: Rows of the position table; 0 for none.
        segments: Rows of the segment table; 0 for none, None if segments are token ids (GPT).
        norm: Whether there is a LayerNorm (GPT has none here).
        norm_bias: Whether the LayerNorm has a bias.
        eps: Added to its variance.
        dropout: Dropout probability of the result.
        padding_idx: A token whose embedding gets no gradient.
        scale: A factor of the result, in the word table's type.
        output_width: The width of a final linear layer, if tables are narrower than the model (ALBERT, ELECTRA).
        norm_last: Whether such a layer has no bias, and comes before LayerNorm and dropout (DeBERTa).
        device, dtype: Device and dtype of the parameters.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        positions: int = 0,
        segments: int | None = 0,
        *,
        norm: bool = True,
        norm_bias: bool = True,
        eps: float = 1e-12,
        dropout: float = 0.1,
        padding_idx: int | None = None,
        scale: float | None = None,
        output_width: int | None = None,
        norm_last: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        if padding_idx is not None and not -vocabulary <= padding_idx < vocabulary:
            raise ValueError(f"Embeddings: padding_idx: expected a token id below {vocabulary}, got {padding_idx}")
        self.word = nn.Embedding(vocabulary, width, padding_idx=padding_idx, **factory)
        self.position = nn.Embedding(positions, width, **factory) if positions else None
        self.segment = nn.Embedding(segments, width, **factory) if segments else None
        self.word_segments = segments is None
        self.norm_last = norm_last and output_width is not None
        normed = output_width if self.norm_last else width
        self.norm = nn.LayerNorm(normed, eps=eps, bias=norm_bias, **factory) if norm else None
        self.projection = (
            None if output_width is None else nn.Linear(width, output_width, bias=not norm_last, **factory)
        )
        self.dropout, self.scale = dropout, scale

    def forward(
        self,
        ids: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        segment_ids: Tensor | None = None,
        seed: Tensor | None = None,
    ) -> Tensor:
        """``[T, C]`` for packed ``ids`` [T] with ``cu_seqlens``, or ``[..., S, C]``; in autocast's dtype under
        autocast.

        By default positions are the tokens' indices in their sequences, and segments are 0; if segments are token ids,
        they are not added by default.
        """
        modules: dict[str, Any] = self._modules  # faster than the module's attributes
        word, position = modules["word"], modules.get("position")
        norm, projection = modules.get("norm"), modules.get("projection")
        segment = word if self.word_segments and segment_ids is not None else modules.get("segment")
        others = [table for table in (position, segment) if table is not None and table is not word]
        if self.norm_last or not _is_fusable(word, others, norm):
            x = self._scaled(self._call_modules(ids, cu_seqlens, segment, position_ids, segment_ids, seed))
            return x if projection is None or self.norm_last else projection(x)
        word_table = word._parameters["weight"]
        x = ops.embedding(
            ids,
            word_table,
            None if position is None else position._parameters["weight"],
            None if segment is None else segment._parameters["weight"],
            position_ids=position_ids,
            segment_ids=segment_ids,
            weight=None if norm is None else norm._parameters["weight"],
            bias=None if norm is None else norm._parameters["bias"],
            layer_norm=norm is not None,
            eps=0.0 if norm is None else norm.eps,
            p=self.dropout if self.training else 0.0,
            cu_seqlens=cu_seqlens,
            padding_idx=word.padding_idx,
            dtype=autocast_type(word_table),
            seed=seed,
        )
        x = self._scaled(x)
        return x if projection is None else projection(x)

    def _scaled(self, x: Tensor) -> Tensor:
        if self.scale is None:
            return x
        return x * torch.full((), self.scale, dtype=self.word.weight.dtype, device=x.device)

    def _call_modules(
        self,
        ids: Tensor,
        cu_seqlens: Tensor | None,
        segment: nn.Module | None,
        position_ids: Tensor | None,
        segment_ids: Tensor | None,
        seed: Tensor | None,
    ) -> Tensor:
        """Calls the embedding modules and the LayerNorm one by one."""
        x: Tensor = self.word(ids)
        if self.position is not None:
            if position_ids is None and cu_seqlens is not None:
                position_ids = ops.position_ids_from_cu_seqlens(cu_seqlens, total=ids.shape[0])
            elif position_ids is None:
                position_ids = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
            x = x + self.position(position_ids)
        if segment is not None:
            x = x + segment(torch.zeros_like(ids) if segment_ids is None else segment_ids)
        if self.norm_last and self.projection is not None:
            x = self.projection(x)
        x = x if self.norm is None else layer_norm(self.norm, x)
        dtype = autocast_type(x)
        x = x if dtype is None else x.to(dtype)
        if not self.training or self.dropout == 0:
            return x
        options: dict[str, Any] = {"p": self.dropout, "cu_seqlens": cu_seqlens, "seed": seed}
        _, dropped = ops.dropout_add_layer_norm(x, torch.zeros_like(x), prenorm=True, **options)
        return dropped


def _is_fusable(word: Any, others: list[Any], norm: Any) -> bool:
    """Whether the tables and the LayerNorm are plain, and only the word table has a padding_idx."""
    modules = (word, *others) if norm is None else (word, *others, norm)
    plain = is_plain(*modules) and isinstance(norm, (nn.LayerNorm, type(None)))
    return plain and all(table.padding_idx is None for table in others)


def autocast_type(x: Tensor) -> torch.dtype | None:
    if not torch._C._is_any_autocast_enabled():
        return None
    device = x.device.type
    autocast = device in ("cpu", "cuda") and torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if autocast else None
