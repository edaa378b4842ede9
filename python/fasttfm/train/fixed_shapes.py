"""Packed batches padded to one shape, as CUDA graphs need it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fasttfm.data import Batch

IGNORED = -100


@dataclass(frozen=True)
class FixedBatch(Batch):
    """A padded batch: sequences of padding tokens after the last one, then empty sequences, with labels of -100."""

    real_tokens: Tensor  # int64 [1]: the number of tokens of the data; padding follows them


@dataclass(frozen=True)
class Shape:
    """The fixed shape to which batches are padded."""

    tokens: int
    sequences: int
    predictions: int
    padding: int  # the id of the padding token


def filled(batch: Batch, shape: Shape) -> Batch:
    """Pads the batch to ``shape``; returns it unchanged if it exceeds the shape.

    Padding tokens form sequences of at most ``max_seqlen`` tokens, so that no sequence of the data changes; ``tokens``
    and ``predictions`` do not include padding.
    """
    missing = shape.tokens - batch.tokens
    fillers = -(-missing // batch.max_seqlen)
    sequences = shape.sequences - batch.sequences
    predictions = 0 if batch.positions is None else shape.predictions - len(batch.positions)
    if missing < 0 or sequences < fillers or predictions < 0:
        return batch
    like: Any = {"dtype": batch.cu_seqlens.dtype, "device": batch.cu_seqlens.device}
    ends = torch.arange(1, sequences + 1, **like) * batch.max_seqlen + batch.tokens
    changes: dict[str, Tensor | None] = {
        "input_ids": pad(batch.input_ids, (0, missing), value=shape.padding),
        "cu_seqlens": torch.cat([batch.cu_seqlens, ends.clamp(max=shape.tokens)]),
        "token_type_ids": _padded(batch.token_type_ids, missing, 0),
        "positions": _padded(batch.positions, predictions, 0),
        "labels": _padded(batch.labels, predictions, IGNORED),
        "sentence_labels": _padded(batch.sentence_labels, sequences, IGNORED),
        "real_tokens": torch.tensor([batch.tokens], dtype=torch.int64, device="cpu"),
    }
    kept = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return FixedBatch(**{**kept, **changes})


def _padded(tensor: Tensor | None, count: int, value: int) -> Tensor | None:
    return None if tensor is None else pad(tensor, (0, count), value=value)
