"""``MaskedLMHead`` and ``CausalLMHead``: from a model's last states to words, or straight to the loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm import ops
from fasttfm.ops import checks

IGNORED = -100  # the label of a token that nothing is predicted for


class Sampled(NamedTuple):
    """A masked-LM loss, and a word drawn for each prediction from the model's distribution."""

    loss: Tensor
    positions: Tensor  # [n]: the rows that are predicted; others, to fill up, have the label -100
    labels: Tensor  # [n]
    words: Tensor  # [n]; -100 where the label is


class MaskedLMHead(nn.Module):
    """Dense layer, activation, LayerNorm and the products with every word: the head of BERT, ALBERT and ELECTRA.

    The loss needs no logits: only rows that are predicted go through the head, and their logits stand in memory a block
    at a time.

    Args:
        width: C, the model's.
        vocabulary: V.
        embedding_width: The word table's, where it is not the model's.
        activation: A name out of ``ops.ACTIVATIONS``.
        eps: Added to LayerNorm's variance.
        device, dtype: The parameters'.
    """

    def __init__(
        self,
        width: int,
        vocabulary: int,
        *,
        embedding_width: int | None = None,
        activation: str = "gelu",
        eps: float = 1e-12,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        inner = width if embedding_width is None else embedding_width
        self.activation = activation
        self.dense = nn.Linear(width, inner, **factory)
        self.norm = nn.LayerNorm(inner, eps=eps, **factory)
        self.decoder = nn.Linear(inner, vocabulary, **factory)  # its weight may be the word table

    def forward(self, x: Tensor) -> Tensor:
        """The logits ``[..., V]`` of ``x`` [..., C]."""
        return functional.linear(self.transform(x), self.decoder.weight, self.decoder.bias)

    def loss(
        self,
        x: Tensor,
        labels: Tensor,
        *,
        positions: Tensor | None = None,
        max_predictions: int | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """The mean cross entropy of the predicted rows of ``x`` [T, C].

        Args:
            labels: ``[T]`` with -100 where nothing is predicted; with ``positions``, one label for each of them.
            positions: int ``[n]``: the rows that are predicted. Nothing waits for a GPU then. To keep n the same from
                step to step, fill up with any row and the label -100.
            max_predictions: Without ``positions``, the most rows that have a label: they are found without a wait. If
                there are more the loss is NaN. With neither, a GPU is waited for.
            reduction: "mean" or "sum".
        """
        positions, labels, missed = _predicted(labels, positions, max_predictions)
        rows = self.transform(x.index_select(0, positions))
        loss = ops.linear_cross_entropy(rows, self.decoder.weight, labels, self.decoder.bias, reduction=reduction)
        assert isinstance(loss, Tensor)
        return loss if missed is None else torch.where(missed, torch.nan, loss)

    def sample(
        self, x: Tensor, labels: Tensor, *, positions: Tensor | None = None, max_predictions: int | None = None
    ) -> Sampled:
        """``loss``, and the words that ELECTRA's generator puts in place of masked ones, drawn in the loss's sweep."""
        positions, labels, missed = _predicted(labels, positions, max_predictions)
        rows = self.transform(x.index_select(0, positions))
        everything = torch.arange(len(positions), device=x.device)
        decoder = self.decoder
        found = ops.masked_lm_loss(rows, decoder.weight, decoder.bias, labels, positions=everything, sample=True)
        assert not isinstance(found, Tensor)
        assert found.samples is not None
        loss = found.loss if missed is None else torch.where(missed, torch.nan, found.loss)
        return Sampled(loss, positions, labels, found.samples)

    def transform(self, x: Tensor) -> Tensor:
        """Dense layer, activation and LayerNorm."""
        dense, norm = self.dense, self.norm
        kind = ops.ACTIVATIONS[self.activation]
        if kind in ("gelu", "gelu_tanh"):
            approximate = "tanh" if kind == "gelu_tanh" else "none"
            hidden = functional.linear(x, dense.weight)
            return ops.gelu_layer_norm(
                hidden, dense.bias, norm.weight, norm.bias, approximate=approximate, eps=norm.eps
            )
        hidden = ops.linear_gelu(x, dense.weight, dense.bias, activation=self.activation)
        return ops.layer_norm(hidden, norm.weight, norm.bias, eps=norm.eps)


class CausalLMHead(nn.Module):
    """The products with every word, and the loss of predicting each sequence's next token: the head of GPT.

    Args:
        width: C.
        vocabulary: V.
        bias: Whether there is one.
        device, dtype: The parameters'.
    """

    def __init__(
        self, width: int, vocabulary: int, *, bias: bool = False, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        # Its weight may be the word table.
        self.decoder = nn.Linear(width, vocabulary, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The logits ``[..., V]`` of ``x`` [..., C]."""
        return functional.linear(x, self.decoder.weight, self.decoder.bias)

    def loss(self, x: Tensor, labels: Tensor, cu_seqlens: Tensor, *, reduction: str = "mean") -> Tensor:
        """The mean cross entropy (or the sum) of each token's successor, for packed ``x`` [T, C]; a label of -100 does
        not count."""
        return next_token_loss(x, self.decoder.weight, self.decoder.bias, labels, cu_seqlens, reduction=reduction)


def next_token_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, cu_seqlens: Tensor, *, reduction: str = "mean"
) -> Tensor:
    """``CausalLMHead.loss`` with a decoder's weight and bias."""
    loss = ops.linear_cross_entropy(x, weight, labels, bias, shift=True, cu_seqlens=cu_seqlens, reduction=reduction)
    assert isinstance(loss, Tensor)
    return loss


def _predicted(labels: Tensor, positions: Tensor | None, most: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows with a label and their labels, filled up to ``most`` with row 0 and -100; whether any is missing."""
    if positions is not None:
        checks.check_shape("MaskedLMHead", "labels", labels, positions.shape)
        return positions, labels, None
    labelled = labels != IGNORED
    if most is None:
        positions = labelled.nonzero().squeeze(1)
        return positions, labels.index_select(0, positions), None
    positions = torch.nonzero_static(labelled, size=min(most, len(labels)), fill_value=-1).squeeze(1)
    found = positions >= 0
    positions = positions.clamp(min=0)
    return positions, labels.index_select(0, positions).where(found, IGNORED), labelled.sum() > most
