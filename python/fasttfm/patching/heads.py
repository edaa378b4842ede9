"""Losses over a vocabulary in training, without logits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fasttfm import ops
from fasttfm.nn.lm_heads import IGNORED
from fasttfm.nn.plain import is_plain_linear
from fasttfm.patching.parts import Patched
from fasttfm.patching.row_wise import are_row_wise


class LossHead(Patched):
    """A model with a language-modelling loss. In training, with labels, it returns the loss and no logits; without
    labels, and in evaluation, it runs transformers' forward.

    A subclass defines ``forward = loss_only(theirs)`` and ``training_loss``.
    """

    loss_arguments: tuple[str, ...] = ("labels",)  # arguments that training_loss takes; without them there is no loss

    def vocabulary_layer(self) -> Any:
        """The linear layer onto the vocabulary."""
        raise NotImplementedError

    def modules_before_loss(self) -> tuple[Any, ...]:
        """The modules between the base model and the loss. transformers calls them with all rows; ``training_loss``
        calls some of them with the predicted rows only, and others not at all."""
        return (self.vocabulary_layer(),)

    def has_known_loss(self: Any) -> bool:
        """Whether transformers would now compute the loss of ``training_loss``: the mean cross entropy of logits with
        ``config.vocab_size`` columns."""
        return bool(self.config.vocab_size == self.vocabulary_layer().weight.shape[0])

    def arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the base model among the caller's arguments ``given``."""
        return given

    def training_loss(self, outputs: Any, *labels: Tensor, **kwargs: Any) -> Any:
        """The model's output, with the loss of the base model's ``outputs``."""
        raise NotImplementedError


def loss_only(theirs: type) -> Callable[..., Any]:
    """The forward of a ``LossHead``, with the signature of the class ``theirs`` that it replaces, which Trainer
    reads."""
    original: Any = theirs.forward  # type: ignore[attr-defined]
    names = list(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        complete = all(given.get(name) is not None for name in self.loss_arguments)
        kept = given.get("logits_to_keep", 0)  # a number of rows, 0 for all, or their indices
        special = isinstance(kept, Tensor) or kept != 0 or given.get("shift_labels") is not None
        if not self.training or not complete or special or not _fusable(self):
            return original(self, *args, **kwargs)
        whole = given.pop("return_dict", None)
        labels = [given.pop(name) for name in self.loss_arguments]
        given.pop("logits_to_keep", None)
        outputs = self.base_model(**self.arguments(given), return_dict=True)
        output = self.training_loss(outputs, *labels, **given)
        return output.to_tuple() if (self.config.return_dict if whole is None else whole) is False else output

    return forward


def _fusable(head: LossHead) -> bool:
    """Whether the loss is the known one, and the modules before it are known and not watched."""
    known = are_row_wise(cast(nn.Module, head), *head.modules_before_loss())
    return known and is_plain_linear(head.vocabulary_layer()) and head.has_known_loss()


class MaskedLMLoss(LossHead):
    does = "masked-LM loss: only of the predicted rows; in training, with labels, there are no logits"

    def before_vocabulary(self, x: Tensor) -> Tensor:
        """The modules between the last layer and the decoder."""
        raise NotImplementedError

    def masked_lm_loss(self, states: Tensor, labels: Tensor, total: Any = None, ignored: int = IGNORED) -> Tensor:
        """The mean cross entropy of the rows of ``states`` [B, S, C] whose label is not ``ignored``. ``total`` replaces
        their number as the divisor."""
        decoder = self.vocabulary_layer()
        x, labels = states.flatten(0, 1), labels.flatten().to(states.device)
        options: dict[str, Any] = {"total": total, "ignore_index": ignored}
        if torch.compiler.is_compiling():  # the number of rows would be unknown
            loss = ops.masked_lm_loss(self.before_vocabulary(x), decoder.weight, decoder.bias, labels, **options)
        else:
            positions = (labels != ignored).nonzero().squeeze(1)
            rows = self.before_vocabulary(x.index_select(0, positions))
            labels = labels.index_select(0, positions)
            loss = ops.linear_cross_entropy(rows, decoder.weight, labels, decoder.bias, **options)
        assert isinstance(loss, Tensor)
        return loss

    def training_loss(self, outputs: Any, *labels: Tensor, total: Any = None, ignored: int = IGNORED, **_: Any) -> Any:
        from transformers.modeling_outputs import MaskedLMOutput

        loss = self.masked_lm_loss(outputs[0], labels[0], total, ignored)
        return MaskedLMOutput(loss=loss, hidden_states=outputs.hidden_states, attentions=outputs.attentions)


class PreTrainingLoss(MaskedLMLoss):
    """The masked-LM loss and that of sentence pairs."""

    output_class: type

    def pair_logits(self, pooled: Tensor) -> Tensor:
        """[B, 2]"""
        raise NotImplementedError

    def training_loss(self, outputs: Any, *labels: Tensor, **_: Any) -> Any:
        words, pairs = labels
        logits = self.pair_logits(outputs.pooler_output)
        loss = self.masked_lm_loss(outputs[0], words) + nn.functional.cross_entropy(logits.view(-1, 2), pairs.view(-1))
        # Its fields are loss, the tokens' logits, the pairs' logits, hidden states and attentions.
        return self.output_class(loss, None, logits, outputs.hidden_states, outputs.attentions)
