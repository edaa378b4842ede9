"""``PackedBatch``: the layout of a packed batch, and of the padded batch that the caller has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.ops.core import checks
from fasttfm.ops.core.library import is_plain
from fasttfm.ops.pack import PACK, UNPACK, layout_of_mask

_NAME = "PackedBatch"


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of several concatenated sequences, and the conversion between them and a padded batch ``[B, S]``.

    ``of`` creates it from a model's arguments.
    """

    cu_seqlens: Tensor  # int32 [sequences + 1]: sequence i is the tokens from cu_seqlens[i] to cu_seqlens[i + 1]
    max_seqlen: int  # an upper bound of the sequences' lengths
    tokens: int
    shape: tuple[int, int] | None = None  # of the padded batch; None for a packed one
    indices: Tensor | None = None  # int64 [T]: the tokens' indices in the padded batch, if padding is not at the end

    @staticmethod
    def of(
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> PackedBatch:
        """The layout of a batch.

        Args:
            input_ids: ``[B, S]``, or packed ``[T]`` with ``cu_seqlens``.
            attention_mask: ``[B, S]``, true or not 0 for tokens; padding may be anywhere. Counting the tokens
                synchronizes with the GPU; pass ``lengths`` to avoid it.
            lengths: ``B`` numbers of tokens, instead of a mask, for padding at the end: Python integers or a tensor on
                the CPU, so that nothing synchronizes with the GPU.
            cu_seqlens: int32 ``[sequences + 1]``, of a packed batch.
            max_seqlen: An upper bound of the lengths of a packed batch; T by default.
        """
        checks.check_index(_NAME, "input_ids", input_ids)
        if cu_seqlens is not None:
            for name, value in (("attention_mask", attention_mask), ("lengths", lengths)):
                if value is not None:
                    raise checks.bad_value(_NAME, name, "None together with cu_seqlens", type(value).__name__)
            if input_ids.dim() != 1:
                raise checks.bad_value(
                    _NAME, "input_ids", "shape [T] together with cu_seqlens", f"{tuple(input_ids.shape)}"
                )
            checks.check_cu_seqlens(_NAME, cu_seqlens, like=input_ids)
            tokens = input_ids.shape[0]
            return PackedBatch(cu_seqlens, tokens if max_seqlen is None else max_seqlen, tokens)
        if max_seqlen is not None:
            raise checks.bad_value(_NAME, "max_seqlen", "None without cu_seqlens", max_seqlen)
        if input_ids.dim() != 2:
            raise checks.bad_value(_NAME, "input_ids", "shape [B, S] without cu_seqlens", f"{tuple(input_ids.shape)}")
        batch, sequence = input_ids.shape
        if lengths is not None:
            if attention_mask is not None:
                raise checks.bad_value(
                    _NAME, "attention_mask", "None together with lengths", type(attention_mask).__name__
                )
            return _from_lengths(input_ids, lengths)
        if attention_mask is not None:
            checks.check_shape(_NAME, "attention_mask", attention_mask, (batch, sequence))
            return PackedBatch.from_mask(attention_mask)
        return PackedBatch.full(input_ids)

    @staticmethod
    def from_mask(mask: Tensor) -> PackedBatch:
        """The layout of a padded batch with a mask ``[B, S]``, true or not 0 for tokens. It synchronizes with the GPU
        once, or twice if padding is not at the end."""
        shape = (mask.shape[0], mask.shape[1])
        if not is_plain((mask,)):
            return _from_traced_mask(mask.bool())
        layout = layout_of_mask(mask) if mask.is_cuda else None
        if layout is not None and layout[2]:
            boundaries, tokens, _ = layout
            return PackedBatch(boundaries, shape[1], tokens, shape)
        there = mask.bool().cpu().numpy()
        if there.all():
            return PackedBatch.full(mask)
        ends = np.zeros(shape[0] + 1, np.int32)
        there.sum(1, dtype=np.int32).cumsum(out=ends[1:])
        boundaries, tokens = on_device(ends, mask.device), int(ends[-1])
        if (there[:, 1:] <= there[:, :-1]).all():  # padding follows the tokens
            return PackedBatch(boundaries, shape[1], tokens, shape)
        return PackedBatch(boundaries, shape[1], tokens, shape, on_device(np.flatnonzero(there), mask.device))

    @staticmethod
    def full(x: Tensor) -> PackedBatch:
        """Boundaries of a batch ``[B, S]`` without padding."""
        batch, sequence = x.shape
        boundaries = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * sequence
        return PackedBatch(boundaries, sequence, batch * sequence, (batch, sequence))

    def pack(self, x: Tensor) -> Tensor:
        """Removes the padding from ``[B, S, ...]``: ``[T, ...]``. A packed tensor is returned unchanged."""
        if self.shape is None:
            return x
        if x.shape[:2] != torch.Size(self.shape):
            raise checks.bad_value(_NAME, "x", f"shape {self.shape} and more", f"shape {tuple(x.shape)}")
        if self.indices is not None:
            return x.flatten(0, 1).index_select(0, self.indices)
        if self.is_full:
            return x.flatten(0, 1)
        return PACK(x, self.cu_seqlens, self.tokens)

    def unpack(self, x: Tensor) -> Tensor:
        """``[T, ...]`` in the caller's shape: ``[B, S, ...]``, padded with 0."""
        if self.shape is None:
            return x
        if self.indices is not None:
            rows = self.shape[0] * self.shape[1]
            return x.new_zeros(rows, *x.shape[1:]).index_copy(0, self.indices, x).unflatten(0, self.shape)
        if self.is_full:
            return x.view(*self.shape, *x.shape[1:])
        return UNPACK(x, self.cu_seqlens, self.shape[1])

    def per_sequence(self, x: Tensor, *, fill: float) -> Tensor:
        """``[T, ...]`` as ``[sequences, S, ...]``, padded with ``fill``, also for packed batches."""
        if self.is_full:
            return self.unpack(x)
        padded = ops.unpack(x, self.cu_seqlens, self.max_seqlen) if self.shape is None else self.unpack(x)
        ones = torch.ones(self.tokens, dtype=torch.bool, device=x.device)
        there = ops.unpack(ones, self.cu_seqlens, self.max_seqlen) if self.shape is None else self.unpack(ones)
        return padded.masked_fill(~there[(...,) + (None,) * (x.dim() - 1)], fill)

    def first_tokens(self, x: Tensor) -> Tensor:
        """The row of each sequence's first token: ``[sequences, ...]``. A sequence without tokens gets some other
        row, or 0 if the batch has no tokens."""
        if self.tokens and self.is_full and self.shape is not None:
            return x.view(*self.shape, *x.shape[1:])[:, 0]
        return self._select(x, self.cu_seqlens[:-1])

    def last_tokens(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        """The row of each sequence's last token: ``[sequences, ...]``. With ``chosen`` (bool [T]) it is the last chosen
        token, or the sequence's first token if none is chosen. A sequence without tokens gets some other row, or 0 if
        the batch has no tokens."""
        rows = self.cu_seqlens[1:] - 1
        if chosen is not None and self.tokens:
            numbers = torch.arange(self.tokens, device=x.device).where(chosen, -1)
            rows = torch.maximum(self.per_sequence(numbers, fill=-1).amax(1), self.cu_seqlens[:-1])
        return self._select(x, rows)

    def _select(self, x: Tensor, rows: Tensor) -> Tensor:
        if self.tokens:
            return x.index_select(0, rows.clamp(0, self.tokens - 1))
        return x.new_zeros(len(rows), *x.shape[1:])

    def rows(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The row of one token of each sequence, given by its column in the padded batch or by its index in a packed
        sequence, and whether that token exists. If it does not, the row is 0."""
        if columns.shape != self.cu_seqlens[1:].shape:
            raise checks.bad_value(_NAME, "columns", f"{len(self.cu_seqlens) - 1} numbers", f"{tuple(columns.shape)}")
        if not self.tokens:
            raise checks.bad_value(_NAME, "columns", "a batch with tokens", "one without")
        if self.indices is None or self.shape is None:
            rows = self.cu_seqlens[:-1] + columns
            known = (columns >= 0) & (columns < self.cu_seqlens.diff())
        else:
            flat = torch.arange(self.shape[0], device=columns.device) * self.shape[1] + columns
            rows = torch.searchsorted(self.indices, flat).clamp(max=self.tokens - 1)
            known = (columns >= 0) & (columns < self.shape[1]) & (self.indices[rows] == flat)
        return rows.where(known, 0), known

    def columns(self) -> Tensor | None:
        """Each token's column in the padded batch; None if it is its index in its sequence."""
        return None if self.indices is None or self.shape is None else self.indices % self.shape[1]

    @property
    def is_full(self) -> bool:
        """Whether the batch has no padding."""
        return self.shape is not None and self.tokens == self.shape[0] * self.shape[1]


def _from_lengths(input_ids: Tensor, lengths: Any) -> PackedBatch:
    batch, sequence = input_ids.shape
    if isinstance(lengths, Tensor):
        lengths = lengths.tolist()
    if len(lengths) != batch or (batch and not 0 <= min(lengths) <= max(lengths) <= sequence):
        raise checks.bad_value(_NAME, "lengths", f"{batch} numbers in [0, {sequence}]", list(lengths))
    total = sum(lengths)
    if total == batch * sequence:
        return PackedBatch.full(input_ids)
    boundaries = ops.cu_seqlens_from_lengths(lengths, device=input_ids.device)
    return PackedBatch(boundaries, max(lengths), total, (batch, sequence))


def _from_traced_mask(mask: Tensor) -> PackedBatch:
    """The layout for a mask whose values cannot be read because a graph is being traced."""
    tokens = int(mask.sum())
    if tokens == mask.numel():
        return PackedBatch.full(mask)
    indices = ops.token_indices_from_mask(mask, total=tokens)
    shape = (mask.shape[0], mask.shape[1])
    return PackedBatch(ops.cu_seqlens_from_mask(mask), shape[1], tokens, shape, indices)


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copies an array to a device without synchronizing with it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
