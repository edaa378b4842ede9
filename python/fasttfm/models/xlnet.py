"""XLNet (Yang et al., 2019): Transformer-XL's encoder, whose attention reads distances as sinusoids, and whether two
tokens are of the same segment.

    x_0 = word
    x_i = LN(y + W gelu(V y)),    y = LN(x_(i-1) + O Attention(x_(i-1)))        i = 1 ... layers

    s_ij = ((q_i + b_w) k_j + (q_i + b_r) R r_(i-j) + (q_i + b_s) e_[g_i != g_j]) / sqrt(D)
    r_d  = [sin(d w), cos(d w)],    w_c = 10000^(-2 c / C)

g are segments: those of both texts, and one of the last token, which sums up the sequence. The second stream and the
permutations of its pre-training are not here, nor are memories of earlier segments. Classes, arguments, outputs and
checkpoints are those of transformers. Internally a batch is packed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm.models.bert import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertHead,
    BertModel,
)
from fasttfm.models.checkpoint_names import Names, Rule
from fasttfm.models.family import Family, Head
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import Encoded
from fasttfm.models.xlnet_config import OF_SEQUENCES, OF_TOKENS, XLNetConfig, names_of
from fasttfm.nn import Embeddings, MaskedLMHead, PackedBatch
from fasttfm.nn.disentangled_layer import FUNCTIONS, Relative, ShiftedLayer

_Base: Any = PretrainedModel if TYPE_CHECKING else object

# ---- the encoder -----------------------------------------------------------------------------------------------------


class XLNetParameters(_Base):
    """The initial values of parameters."""

    def initialise(self, module: nn.Module) -> None:
        super().initialise(module)
        if isinstance(module, ShiftedLayer):
            for parameter in (module.content_bias, module.position_bias, module.segment_bias, module.segment):
                nn.init.normal_(parameter, std=self.config.initializer_range)


class XLNetModel(XLNetParameters, BertModel):
    """The encoder, called as ``BertModel`` is, without positions; it has no pooler."""

    config_class = XLNetConfig
    reads_segments = True
    layer_inputs = ("segments",)
    mask_emb: Tensor

    def __init__(self, config: Any, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.names = names_of(config, OF_TOKENS, OF_SEQUENCES)
        table: Tensor = self.embeddings.word.weight
        self.register_buffer("mask_emb", table.new_zeros(1, 1, config.d_model))  # pre-training's, in checkpoints
        self.finish()

    def embeddings_of(self, config: Any) -> Embeddings:
        return Embeddings(config.vocab_size, config.d_model, norm=False, dropout=config.dropout)

    def layers_of(self, config: Any) -> list[Any]:
        sizes = (config.d_model, config.n_head, config.d_inner)
        rates = {"dropout": config.dropout, "attention_dropout": config.dropout}
        options = {"activation": config.ff_activation, "eps": config.layer_norm_eps, **rates}
        return [ShiftedLayer(*sizes, **options) for _ in range(config.n_layer)]

    def encode_packed(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        **layout: Any,
    ) -> Encoded:
        segments = None if token_type_ids is None else token_type_ids.expand_as(input_ids)
        return super().encode_packed(input_ids, attention_mask, None, position_ids, segments=segments, **layout)

    def positions(self, input_ids: Tensor, ids: Tensor, position_ids: Tensor | None, batch: PackedBatch) -> None:
        if position_ids is not None:
            expected = "None (attention reads how far apart tokens are)"
            raise ValueError(f"{type(self).__name__}: position_ids: expected {expected}, got a tensor")

    def relative(self, batch: PackedBatch, segments: Tensor | None) -> Relative:
        """The sinusoids of a batch's distances, and its segments."""
        longest, device = batch.max_seqlen if batch.shape is None else batch.shape[1], batch.cu_seqlens.device
        distances = torch.arange(1 - longest, longest, device=device).float()
        if self.config.clamp_len > 0:
            distances = distances.clamp(-self.config.clamp_len, self.config.clamp_len)
        columns = torch.arange(0, self.config.d_model, 2, device=device).float()
        angles = distances[:, None] * (1 / 10000.0 ** (columns / self.config.d_model))
        table = torch.cat((angles.sin(), angles.cos()), 1).to(self.embeddings.word.weight.dtype)
        table = functional.dropout(table, self.config.dropout, self.training)
        rows = torch.arange(distances.shape[0], dtype=torch.int32, device=device)
        return Relative(batch, table, rows, None if segments is None else batch.pack(segments))

    def run_layers(
        self, x: Tensor, batch: PackedBatch, hidden_states: list[Tensor] | None, segments: Tensor | None = None
    ) -> Tensor:
        relative = self.relative(batch, segments)
        states = self.encoder(x, batch.cu_seqlens, batch.max_seqlen, hidden_states=hidden_states, relative=relative)
        return functional.dropout(states, self.config.dropout, self.training)

    def attention_options(
        self, batch: PackedBatch, longest: int, segments: Tensor | None = None, **others: Any
    ) -> dict[str, Any]:
        return {"relative": self.relative(batch, segments)}


# ---- heads -----------------------------------------------------------------------------------------------------------


class XLNetHead(XLNetParameters, BertHead):
    """A model around the encoder."""

    config_class, encoder_class = XLNetConfig, XLNetModel
    classifiers: ClassVar[tuple[Rule, ...]] = (OF_TOKENS, OF_SEQUENCES)

    def names_of(self, config: Any) -> Names:
        return names_of(config, *self.classifiers)

    def lm_head_of(self, config: Any) -> MaskedLMHead:
        return MaskedLMHead(config.d_model, config.vocab_size, transforms=False)


class XLNetLMHeadModel(XLNetHead, BertForMaskedLM):
    """Predicts masked tokens, of the states at their positions: transformers' model without permutations."""


class XLNetForTokenClassification(XLNetHead, BertForTokenClassification):
    """Labels tokens."""


class XLNetForQuestionAnsweringSimple(XLNetHead, BertForQuestionAnswering):
    """Finds the span that answers a question."""


class SummaryHead(XLNetHead):
    """A model that reads the last token of each sequence, or the first, through a dense layer."""

    pooler: ClassVar[bool] = False  # the encoder has none
    classifiers = (OF_SEQUENCES, OF_TOKENS)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.summary = nn.Linear(config.d_model, config.d_model) if config.summary_use_proj else None
        self.dropout = nn.Dropout(config.summary_last_dropout)
        self.finish()

    def summarise(self, encoded: Encoded) -> Tensor:
        """[sequences, C]"""
        last = self.config.summary_type == "last"
        vector = encoded.batch.last_tokens(encoded.x) if last else encoded.first_tokens()
        vector = vector if self.summary is None else self.summary(vector)
        activation = self.config.summary_activation
        summary: Tensor = self.dropout(FUNCTIONS[activation](vector) if activation else vector)
        return summary


class XLNetForSequenceClassification(SummaryHead, BertForSequenceClassification):
    """Labels sequences."""

    def classify(self, encoded: Encoded) -> Tensor:
        logits: Tensor = self.classifier(self.summarise(encoded))
        return logits


class XLNetForMultipleChoice(SummaryHead, BertForMultipleChoice):
    """Chooses between continuations."""


FAMILY = Family(
    "XLNet",
    XLNetConfig,
    {
        Head.NONE: XLNetModel,
        Head.MASKED_LM: XLNetLMHeadModel,
        Head.SEQUENCE_CLASSIFICATION: XLNetForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: XLNetForTokenClassification,
        Head.QUESTION_ANSWERING: XLNetForQuestionAnsweringSimple,
        Head.MULTIPLE_CHOICE: XLNetForMultipleChoice,
    },
    tokenizer="unigram",
    last_token=True,
)
