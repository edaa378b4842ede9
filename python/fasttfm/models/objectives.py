"""Pre-training objectives: modules that return the sums of their losses over a packed batch.

    bert      masked LM + next sentence           albert    masked LM + sentence order
    roberta   masked LM                           electra   the generator's masked LM + 50 * replaced token detection
    distilbert masked LM                          gpt(2, 3) causal LM

Each has the name that ``fasttfm pretrain --objective`` calls it by; ``families.objectives_of`` lists those of a family.

A batch may be padded to a fixed shape (``fixed_shapes``); padding does not contribute to any sum.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm import ops
from fasttfm.models.text_model import LAST_STATES, Encoded, TextModel
from fasttfm.nn import PackedLayer, PackedTransformer

IGNORED = -100


class Pretraining(nn.Module):
    """A model whose forward returns the sums of its losses, one for each of ``terms``; the loss is the sum of their
    means, each times its weight."""

    name: ClassVar[str] = ""  # on the command line
    terms: ClassVar[tuple[str, ...]] = ()

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the terms."""
        return (1.0,) * len(self.terms)

    def counts(self, batch: Any) -> tuple[int, ...]:
        """The divisors of the terms' means."""
        raise NotImplementedError

    def flops(self, batch: Any) -> float:
        """The FLOPs of a step's GEMMs: the forward's, and twice as many in the backward."""
        lengths = batch.cu_seqlens.clamp(max=batch.tokens).diff().double()  # padding follows the data
        encoders = [module for module in self.modules() if isinstance(module, PackedTransformer)]
        tokens, scores = float(lengths.sum()), float(lengths.square().sum())
        return 3.0 * (sum(_encoder_flops(encoder, tokens, scores) for encoder in encoders) + self.head_flops(batch))

    def head_flops(self, batch: Any) -> float:
        head = self.model.lm_head
        products = sum(module.weight.numel() for module in head.modules() if isinstance(module, nn.Linear))
        return 2.0 * products * batch.predictions


def _encoder_flops(encoder: PackedTransformer, tokens: float, scores: float) -> float:
    layers = encoder.in_order()
    share = 0.5 if layers and layers[0].window[1] == 0 else 1.0  # causal: half of the scores
    return sum(2.0 * tokens * _matrix_elements(layer) + share * 4.0 * scores * layer.width for layer in layers)


def _matrix_elements(layer: PackedLayer) -> int:
    return sum(linear.weight.numel() for linear in (layer.qkv, layer.out, layer.up, layer.down))


class MaskedLM(Pretraining):
    """RoBERTa's."""

    name = "mlm"
    terms: ClassVar[tuple[str, ...]] = ("masked_lm",)

    def counts(self, batch: Any) -> tuple[int, ...]:
        return (batch.predictions,)

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        return (self.masked_lm(_encoded(self.model.encoder, batch), batch),)

    def masked_lm(self, encoded: Encoded, batch: Any) -> Tensor:
        loss: Tensor = self.model.lm_head.loss(encoded.x, batch.labels, positions=batch.positions, reduction="sum")
        return loss

    def word_logits(self, sentence: Tensor, position: int, special: Any) -> Tensor:
        """The logits for the token at ``position``, which is masked."""
        ends = sentence.new_tensor([special.cls, special.sep])
        ids = torch.cat([ends[:1], sentence, ends[1:]])
        ids[position + 1] = special.mask
        return _logits_at(self.model, self.model.encoder, ids, position + 1)


class MaskedLMWithSentences(MaskedLM):
    """Masked LM and a label of each pair of sentences; the kind of pairs says what the label means."""

    def counts(self, batch: Any) -> tuple[int, ...]:
        return batch.predictions, int((batch.sentence_labels != IGNORED).sum())

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        encoded = _encoded(self.model.encoder, batch)
        logits = self.model.sentence_logits(self.model.encoder.pool(encoded)).float()
        sentences = functional.cross_entropy(logits, batch.sentence_labels, reduction="sum", ignore_index=IGNORED)
        return self.masked_lm(encoded, batch), sentences


class NextSentence(MaskedLMWithSentences):
    """BERT's."""

    name = "mlm+nsp"
    terms: ClassVar[tuple[str, ...]] = ("masked_lm", "next_sentence")


class SentenceOrder(MaskedLMWithSentences):
    """ALBERT's."""

    name = "mlm+sop"
    terms = ("masked_lm", "sentence_order")


class ReplacedTokenDetection(Pretraining):
    """ELECTRA's: the loss of the generator, and that of the discriminator, which has the weight lambda."""

    name = "rtd"
    terms = ("masked_lm", "replaced_tokens")

    @property
    def weights(self) -> tuple[float, ...]:
        return 1.0, float(self.model.config.discriminator_weight)

    def counts(self, batch: Any) -> tuple[int, ...]:
        return batch.predictions, batch.tokens

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        output = self.model(
            batch.input_ids,
            labels=batch.labels,
            positions=batch.positions,
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
        )
        masked_lm = output.generator_loss * (batch.labels != IGNORED).sum()
        replaced = ops.replaced_token_loss(output.logits, output.replaced, mask=_real(batch), reduction="sum")
        return masked_lm, replaced

    def head_flops(self, batch: Any) -> float:
        head = self.model.generator.lm_head
        products = sum(module.weight.numel() for module in head.modules() if isinstance(module, nn.Linear))
        dense = self.model.discriminator.discriminator_head.dense.weight.numel()
        return 2.0 * (products * batch.predictions + dense * batch.tokens)


class CausalLM(Pretraining):
    """The GPTs'."""

    name = "clm"
    terms = ("causal_lm",)

    def counts(self, batch: Any) -> tuple[int, ...]:
        return (batch.predictions,)

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        encoded = _encoded(self.model.transformer, batch)
        real = _real(batch)
        labels = batch.input_ids if real is None else torch.where(real, batch.input_ids, IGNORED)
        return (self.model.lm_head.loss(encoded.x, labels, batch.cu_seqlens, reduction="sum"),)

    def word_logits(self, sentence: Tensor, position: int, special: Any) -> Tensor:
        """The logits for the token at ``position``, given the tokens before it."""
        return _logits_at(self.model, self.model.transformer, sentence[:position], position - 1)


def _encoded(model: TextModel, batch: Any) -> Encoded:
    layout: dict[str, Any] = {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen, **LAST_STATES}
    return model.encode(batch.input_ids, None, batch.token_type_ids, **layout)


def _logits_at(model: Any, body: TextModel, ids: Tensor, position: int) -> Tensor:
    cu_seqlens = torch.tensor([0, len(ids)], dtype=torch.int32, device=ids.device)
    encoded = body.encode(ids, None, None, cu_seqlens=cu_seqlens, max_seqlen=len(ids), **LAST_STATES)
    logits: Tensor = model.lm_head(encoded.x[position])
    return logits


def _real(batch: Any) -> Tensor | None:
    """Which tokens of a padded batch are not padding; None for all."""
    count = getattr(batch, "real_tokens", None)
    return None if count is None else torch.arange(len(batch.input_ids), device=count.device) < count
