"""LoRA (Hu et al., 2022) of the linear layers of transformer layers: frozen weights and trained low-rank updates.

    y = x W^T + bias + scale (dropout(x) A^T) B^T

``LoraLinear`` replaces a layer's ``nn.Linear``. Transformer layers read its parameters and compute everything in their
plan (ops/layers/lora.py); if it is watched, or drops elements of x, it is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm.nn.plain import has_plain_tensors
from fasttfm.ops.core import checks
from fasttfm.ops.layers.lora import LINEARS, Pair
from fasttfm.ops.layers.spec import Adapter
from fasttfm.ops.linear import autocast, dense

Blocks = tuple[tuple[int, int], ...]  # ranges of a linear layer's outputs


class Matrices(NamedTuple):
    """An adapter of a linear layer, as checkpoints have it: of each block of outputs that it changes."""

    blocks: Blocks
    a: tuple[Tensor, ...]  # [rank, inputs] of each block
    b: tuple[Tensor, ...]  # [outputs of the block, rank]
    scale: float


class AdaptedLinear(nn.Module):
    """A linear layer, whose parameters it takes over, with something added to its result."""

    bias: nn.Parameter | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)

    def is_readable(self) -> bool:
        """Whether a plan may read the parameters instead of calling the module."""
        return has_plain_tensors(self)

    def adapter(self, linear: str) -> Adapter | None:
        """What is added, as data; ``linear`` is the layer's name for this module. None for nothing at the moment."""
        raise NotImplementedError

    def pair(self) -> Pair:
        raise NotImplementedError

    def linear(self) -> nn.Linear:
        """The linear layer without what is added."""
        with torch.device("meta"):
            plain = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        plain.weight = self.weight
        plain.register_parameter("bias", self.bias)
        return plain.train(self.training)


class LoraLinear(AdaptedLinear):
    """A linear layer with one adapter. ``lora_a`` [blocks * rank, inputs] and ``lora_b`` [outputs of all blocks, rank]
    are in fp32 (fp64 for fp64 models) for any dtype of the weight; GEMMs read them in x's dtype.

    Args:
        linear: The layer, which is frozen.
        rank: The number of rows of each A.
        scale: The factor of the update, ``alpha / rank``.
        blocks: The ranges of outputs that have matrices of their own, as query, key and value; by default one, which is
            all of them. As in PEFT, A is drawn from a uniform distribution, and B is 0.
        dropout: Dropout probability of the update's input.
    """

    def __init__(
        self, linear: nn.Linear, rank: int, *, scale: float = 1.0, blocks: Blocks = (), dropout: float = 0.0
    ) -> None:
        super().__init__(linear)
        checks.check_number("LoraLinear", "dropout", dropout, low=0.0, high=1.0)
        if rank < 1:
            raise checks.bad_value("LoraLinear", "rank", "at least 1", rank)
        self.rank, self.scale, self.dropout = rank, scale, dropout
        self.blocks = blocks or ((0, self.out_features),)
        self.weight.requires_grad_(False)
        if self.bias is not None:
            self.bias.requires_grad_(False)
        dtype = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        factory: dict[str, Any] = {"device": self.weight.device, "dtype": dtype}
        outputs = sum(last - first for first, last in self.blocks)
        self.lora_a = nn.Parameter(torch.empty(len(self.blocks) * rank, self.in_features, **factory))
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank, **factory))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    @torch.no_grad()
    def load(self, matrices: Matrices) -> None:
        """Copies an adapter with the same blocks and rank."""
        self.lora_a.copy_(torch.cat(matrices.a))
        self.lora_b.copy_(torch.cat(matrices.b))

    def matrices(self) -> Matrices:
        sizes = [last - first for first, last in self.blocks]
        return Matrices(self.blocks, self.lora_a.split(self.rank), self.lora_b.split(sizes), self.scale)

    def is_readable(self) -> bool:
        """It may not be read with dropout in training, nor if a matrix has another shape or device than at first."""
        if (self.dropout and self.training) or not super().is_readable():
            return False
        outputs = sum(last - first for first, last in self.blocks)
        shapes = ((len(self.blocks) * self.rank, self.in_features), (outputs, self.rank))
        devices = {self.weight.device, self.lora_a.device, self.lora_b.device}
        return (self.lora_a.shape, self.lora_b.shape) == shapes and len(devices) == 1

    def adapter(self, linear: str) -> Adapter:
        return Adapter(linear, self.rank, self.out_features, self.blocks)

    def pair(self) -> Pair:
        return Pair(self.lora_a, self.lora_b, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        y = dense(x, self.weight, self.bias)
        (x,) = autocast(x)
        t = dense(functional.dropout(x, self.dropout, self.training), self.lora_a.to(x.dtype))
        parts = t.split(self.rank, -1)
        b = self.lora_b.to(x.dtype)
        updates, start, at = [], 0, 0
        for (first, last), part in zip(self.blocks, parts, strict=True):
            if first > at:
                updates.append(y.new_zeros((*y.shape[:-1], first - at)))
            updates.append(dense(part, b[start : start + last - first]))
            start, at = start + last - first, last
        if at < self.out_features:
            updates.append(y.new_zeros((*y.shape[:-1], self.out_features - at)))
        return y + self.scale * torch.cat(updates, -1)

    @torch.no_grad()
    def merge(self) -> None:
        """Adds the update to the weight. The update stays, too, so that ``linear()`` is to be used after it."""
        for (first, last), a, b in zip(*self.matrices()[:3], strict=True):
            self.weight[first:last] += (self.scale * (b @ a)).to(self.weight.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, blocks={len(self.blocks)}"


class Selection:
    """The adapters of the tokens of a call, for all modules of a model: int32 [T], -1 for none; None if no token has
    one. The caller that sets it orders it: one call at a time, on one stream."""

    def __init__(self) -> None:
        self.adapters: Tensor | None = None

    @contextmanager
    def of(self, adapters: Tensor | None) -> Iterator[None]:
        before, self.adapters = self.adapters, adapters
        try:
            yield
        finally:
            self.adapters = before


class SelectedLinear(AdaptedLinear):
    """A linear layer, without gradients, with several adapters, of which each token of a packed batch has one or none.
    The adapters are no part of the state: they stay where the layer was when it was made.

    Args:
        linear: The layer.
        blocks: The ranges of outputs that have matrices of their own in any of the adapters.
        adapters: Each adapter of this layer; None for one that does not change it.
        selection: Which adapter each token has.
    """

    def __init__(
        self, linear: nn.Linear, blocks: Blocks, adapters: Sequence[Matrices | None], selection: Selection
    ) -> None:
        super().__init__(linear)
        self.blocks, self.selection = blocks, selection
        step = 16 if linear.weight.is_cuda else 1
        self.rank = max(-(-len(a) // step) * step for matrices in adapters if matrices is not None for a in matrices.a)
        like = linear.weight
        # A of all blocks, [adapters, blocks * rank, inputs], and B [adapters, outputs, rank], of which the rows of a
        # block multiply its part of x A^T.
        self.a = like.new_zeros(len(adapters), len(blocks) * self.rank, self.in_features, requires_grad=False)
        self.b = like.new_zeros(len(adapters), self.out_features, self.rank, requires_grad=False)
        for index, matrices in enumerate(adapters):
            for block, a, b in zip(*matrices[:3], strict=True) if matrices is not None else ():
                assert matrices is not None
                row, rank = self.blocks.index(block) * self.rank, len(a)
                self.a[index, row : row + rank] = a.to(like)
                self.b[index, slice(*block), :rank] = (matrices.scale * b.float()).to(like)

    def adapter(self, linear: str) -> Adapter | None:
        if self.selection.adapters is None:
            return None
        return Adapter(linear, self.rank, self.out_features, self.blocks, selected=True)

    def pair(self) -> Pair:
        return Pair(self.a, self.b)

    def forward(self, x: Tensor) -> Tensor:
        y, adapters = dense(x, self.weight, self.bias), self.selection.adapters
        if adapters is None:
            return y
        if x.shape[:-1] != adapters.shape:
            got = f"shape {tuple(x.shape)} for {len(adapters)} tokens"
            raise checks.bad_value("SelectedLinear", "x", "a row for each token of the batch", got)
        for index, (a, b) in enumerate(zip(self.a, self.b, strict=True)):
            t = dense(x, a).split(self.rank, -1)
            for (first, last), part in zip(self.blocks, t, strict=True):
                update = torch.where((adapters == index)[:, None], dense(part, b[first:last]), 0.0)
                y[:, first:last] += update
        return y


def adapted_modules(layer: Any) -> dict[str, AdaptedLinear]:
    """The linear layers of a transformer layer that have adapters, by their names."""
    modules = layer._modules
    return {name: modules[name] for name in LINEARS if isinstance(modules.get(name), AdaptedLinear)}
