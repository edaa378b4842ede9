"""Attention that reads how far apart two tokens are, in MPNet and T5:

    s_ij = scale q_i k_j + table[bucket(j - i), head]        the same table in all layers

Half of the buckets are for keys up to the query, half for those after it. Half of each are for one distance each, the
others for logarithmic ranges up to a farthest distance. The bias is that of ``ops.attention``: Triton's kernels on a
GPU, plain torch on a CPU. All layers and all sequences without padding between tokens share one tensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm import ops
from fasttfm.models.text_model import TextModel
from fasttfm.nn import PackedBatch

_Base: Any = TextModel if TYPE_CHECKING else object


def buckets(positions: Tensor, count: int, farthest: int) -> Tensor:
    """The bucket of every query and key, ``[..., S, S]``, of their positions ``[..., S]``."""
    distance = positions[..., None, :] - positions[..., :, None]
    half, near = count // 2, count // 4
    far = distance.abs()
    ranges = torch.log(far.float() / near) / math.log(farthest / near) * (half - near)
    logarithmic = (near + ranges.clamp(min=0).long()).clamp(max=half - 1)
    return half * (distance > 0) + torch.where(far < near, far, logarithmic)


class RelativeBias(_Base):
    """A text model with the table ``distances``, whose layers take ``bias``."""

    distances: nn.Embedding
    farthest = 128

    def bias_at(self, positions: Tensor) -> Tensor:
        """``[..., H, S, S]`` for tokens at ``positions`` [..., S]."""
        table = self.distances.weight
        values = functional.embedding(buckets(positions, len(table), self.farthest), table)
        return values.movedim(-1, -3).contiguous()

    def bias(self, batch: PackedBatch, longest: int) -> Tensor:
        """``[1, H, longest, longest]``; of a batch with padding between tokens ``[B, H, longest, longest]``."""
        columns, every = batch.columns(), torch.arange(longest, device=batch.cu_seqlens.device)
        return self.bias_at(every[None] if columns is None else ops.unpack(columns, batch.cu_seqlens, longest))

    def run_layers(self, x: Tensor, batch: PackedBatch, hidden_states: list[Tensor] | None) -> Tensor:
        bias = self.bias(batch, batch.max_seqlen)
        states: Tensor = self.encoder(x, batch.cu_seqlens, batch.max_seqlen, hidden_states=hidden_states, bias=bias)
        return states

    def attention_options(self, batch: PackedBatch, longest: int, **others: Any) -> dict[str, Any]:
        return {"bias": self.bias(batch, longest)}
