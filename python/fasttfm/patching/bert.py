"""BERT's modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.bert import modeling_bert as theirs

from fasttfm.patching import heads, packing, parts


class BertEmbeddings(parts.Embeddings, theirs.BertEmbeddings): ...


class BertSelfAttention(parts.SelfAttention, theirs.BertSelfAttention): ...


class BertSelfOutput(parts.AddNorm, theirs.BertSelfOutput): ...


class BertIntermediate(parts.Intermediate, theirs.BertIntermediate): ...


class BertOutput(parts.AddNorm, theirs.BertOutput): ...


class BertEncoder(packing.BertLayers, theirs.BertEncoder): ...


class BertPredictionHeadTransform(parts.HeadTransform, theirs.BertPredictionHeadTransform): ...


class _Head(heads.MaskedLMLoss):
    def modules_before_loss(self: Any) -> tuple[Any, ...]:
        return (self.cls,)

    def vocabulary_layer(self: Any) -> Any:
        return self.cls.predictions.decoder

    def before_vocabulary(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.cls.predictions.transform(x)
        return y


class BertForMaskedLM(_Head, theirs.BertForMaskedLM):
    forward = heads.loss_only(theirs.BertForMaskedLM)


class BertForPreTraining(_Head, heads.PreTrainingLoss, theirs.BertForPreTraining):
    loss_arguments = ("labels", "next_sentence_label")
    output_class = theirs.BertForPreTrainingOutput
    forward = heads.loss_only(theirs.BertForPreTraining)

    def pair_logits(self: Any, pooled: Tensor) -> Tensor:
        logits: Tensor = self.cls.seq_relationship(pooled)
        return logits


MODEL = theirs.BertPreTrainedModel
CLASSES = (
    BertEmbeddings,
    BertSelfAttention,
    BertSelfOutput,
    BertIntermediate,
    BertOutput,
    BertEncoder,
    BertPredictionHeadTransform,
    BertForMaskedLM,
    BertForPreTraining,
)
LEFT: dict[str, str] = {}
