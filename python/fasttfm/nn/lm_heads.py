"""``MaskedLMHead`` and ``CausalLMHead``: logits of a model's last hidden states, or their loss without logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm import ops
from fasttfm.nn.parts import known_activation, masked_lm_transform
from fasttfm.nn.plain import is_plain, register_plain_class
from fasttfm.ops.core import checks

IGNORED = -100  # the label of tokens without a prediction


class Sampled(NamedTuple):
    """A masked-LM loss, and a token sampled for each prediction from the model's distribution."""

    loss: Tensor
    positions: Tensor  # [n]: the predicted rows; padding has the label -100
    labels: Tensor  # [n]
    words: Tensor  # [n]: the sampled tokens; -100 where the label is -100


class MaskedLMHead(nn.Module):
    """Dense layer, activation, LayerNorm and decoder: the head of BERT, ALBERT and ELECTRA.

    The loss does not store the logits: the head computes only the predicted rows, and one block of their logits at a
    time.

    Args:
        width: C, the model's width.
        vocabulary: V.
        embedding_width: The width of the word table, if it is not the model's.
        activation: A key of ``ops.ACTIVATIONS``.
        eps: Added to LayerNorm's variance.
        dense_bias, norm_bias, decoder_bias: Whether these parts have a bias.
        transforms: Whether there are a dense layer, an activation and a LayerNorm before the decoder.
        device, dtype: Device and dtype of the parameters.
    """

    def __init__(
        self,
        width: int,
        vocabulary: int,
        *,
        transforms: bool = True,
        embedding_width: int | None = None,
        activation: str = "gelu",
        eps: float = 1e-12,
        dense_bias: bool = True,
        norm_bias: bool = True,
        decoder_bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        inner = width if embedding_width is None else embedding_width
        self.activation = known_activation("MaskedLMHead", activation)
        self.dense = nn.Linear(width, inner, bias=dense_bias, **factory) if transforms else None
        self.norm = nn.LayerNorm(inner, eps=eps, bias=norm_bias, **factory) if transforms else None
        self.decoder = nn.Linear(inner, vocabulary, bias=decoder_bias, **factory)  # its weight may be the word table

    def forward(self, x: Tensor) -> Tensor:
        """The logits ``[..., V]`` of ``x`` [..., C]."""
        logits: Tensor = self.decoder(self.transform(x))
        return logits

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
            labels: ``[T]`` with -100 for tokens without a prediction; with ``positions``, one label for each of them.
            positions: int ``[n]``: the predicted rows, which avoids a synchronization with the GPU. To keep n constant,
                pad with any row and the label -100.
            max_predictions: Without ``positions``, the maximum number of rows with a label; it also avoids the
                synchronization. If there are more, the loss is NaN.
            reduction: "mean" or "sum".
        """
        positions, labels, missed = _predicted(labels, positions, max_predictions)
        rows, decoder = x.index_select(0, positions), self.decoder
        if is_plain(self):
            fused = ops.linear_cross_entropy(
                self.transform(rows), decoder.weight, labels, decoder.bias, reduction=reduction
            )
            assert isinstance(fused, Tensor)
            loss = fused
        else:
            loss = _loss_of_logits(self(rows), labels, reduction)
        return loss if missed is None else torch.where(missed, torch.nan, loss)

    def sample(
        self, x: Tensor, labels: Tensor, *, positions: Tensor | None = None, max_predictions: int | None = None
    ) -> Sampled:
        """``loss``, and the tokens that ELECTRA's generator puts at masked positions, sampled in the same pass."""
        if not is_plain(self):
            expected = "a head and a decoder without hooks, wrappers or LoRA (tokens are sampled in the fused loss)"
            raise checks.bad_value("MaskedLMHead.sample", "decoder", expected, repr(self.decoder))
        positions, labels, missed = _predicted(labels, positions, max_predictions)
        rows = self.transform(x.index_select(0, positions))
        everything = torch.arange(len(positions), device=x.device)
        decoder = self.decoder
        result = ops.masked_lm_loss(rows, decoder.weight, decoder.bias, labels, positions=everything, sample=True)
        assert not isinstance(result, Tensor)
        assert result.samples is not None
        loss = result.loss if missed is None else torch.where(missed, torch.nan, result.loss)
        return Sampled(loss, positions, labels, result.samples)

    def transform(self, x: Tensor) -> Tensor:
        """Dense layer, activation and LayerNorm, if the head has them."""
        return x if self.dense is None else masked_lm_transform(self.dense, self.activation, self.norm, x)


class CausalLMHead(nn.Module):
    """The decoder, and the loss of predicting each sequence's next token: the head of GPT.

    Args:
        width: C.
        vocabulary: V.
        bias: Whether the decoder has a bias.
        device, dtype: Device and dtype of the parameters.
    """

    def __init__(
        self, width: int, vocabulary: int, *, bias: bool = False, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        # Its weight may be the word table.
        self.decoder = nn.Linear(width, vocabulary, bias=bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The logits ``[..., V]`` of ``x`` [..., C]."""
        logits: Tensor = self.decoder(self.transform(x))
        return logits

    def transform(self, x: Tensor) -> Tensor:
        """What a subclass computes before the decoder."""
        return x

    def loss(self, x: Tensor, labels: Tensor, cu_seqlens: Tensor, *, reduction: str = "mean") -> Tensor:
        """The mean (or sum) cross entropy of the next tokens for packed ``x`` [T, C]; the label -100 is ignored."""
        if is_plain(self):
            weight, bias = self.decoder.weight, self.decoder.bias
            return next_token_loss(self.transform(x), weight, bias, labels, cu_seqlens, reduction=reduction)
        return _loss_of_logits(self(x), _next_labels(labels, cu_seqlens), reduction)


def _next_labels(labels: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The label of the next token for each token; -100 for the last token of a sequence."""
    checks.check_cu_seqlens("CausalLMHead", cu_seqlens, like=labels)
    checks.check_cu_seqlens_values("CausalLMHead", cu_seqlens, len(labels))
    ends = torch.zeros(len(labels) + 1, dtype=torch.bool, device=labels.device)
    ends = ends.index_fill(0, cu_seqlens[1:].long(), True)
    return labels.roll(-1).masked_fill(ends[1:], IGNORED)


def _loss_of_logits(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """The result of the fused losses, from the logits of modules that are called."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"loss: reduction: expected mean or sum, got {reduction!r}")
    total = functional.cross_entropy(logits.float() if logits.element_size() < 4 else logits, labels, reduction="sum")
    return total if reduction == "sum" else total / (labels != IGNORED).sum().clamp(min=1)


for _head in (MaskedLMHead, CausalLMHead):
    register_plain_class(_head, lambda head: is_plain(head._modules["decoder"]))


def next_token_loss(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, cu_seqlens: Tensor, *, reduction: str = "mean"
) -> Tensor:
    """``CausalLMHead.loss`` with a decoder's weight and bias."""
    loss = ops.linear_cross_entropy(x, weight, labels, bias, shift=True, cu_seqlens=cu_seqlens, reduction=reduction)
    assert isinstance(loss, Tensor)
    return loss


def _predicted(labels: Tensor, positions: Tensor | None, most: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows with a label and their labels, padded to ``most`` with row 0 and -100; and whether there are more."""
    if positions is not None:
        checks.check_shape("MaskedLMHead", "labels", labels, positions.shape)
        return positions, labels, None
    labelled = labels != IGNORED
    if most is None:
        positions = labelled.nonzero().squeeze(1)
        return positions, labels.index_select(0, positions), None
    positions = torch.nonzero_static(labelled, size=min(most, len(labels)), fill_value=-1).squeeze(1)
    present = positions >= 0
    positions = positions.clamp(min=0)
    return positions, labels.index_select(0, positions).where(present, IGNORED), labelled.sum() > most
