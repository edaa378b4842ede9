"""DeBERTa-v2 and -v3 (He et al., 2020 and 2021): BERT's encoder, whose attention keeps content and position apart.

    s_ij = (q_i k_j + q_i kp_d + k_j qp_d) / sqrt(3 D),    d = row(i - j),    kp = K_p r,  qp = Q_p r

r has a row for every distance up to ``position_buckets`` / 2, and for each logarithmic range beyond. Content to
position (c2p) is the second product, position to content (p2c) the third; ``pos_att_type`` says which there are, and
the 3 is one more than their number. With ``share_att_key`` K_p and Q_p are the layer's own projections of keys and
queries. ``conv_kernel_size`` adds a convolution to the first layer. Classes, arguments, outputs and checkpoints are
those of transformers. Internally a batch is packed.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fasttfm import ops
from fasttfm.models.bert import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertHead,
    BertModel,
)
from fasttfm.models.checkpoint_names import Names
from fasttfm.models.deberta_v2_config import DebertaV2Config, names_of
from fasttfm.models.family import Family, Head
from fasttfm.models.text_model import Encoded
from fasttfm.nn import Embeddings, MaskedLMHead, PackedBatch
from fasttfm.nn.disentangled_layer import (
    FUNCTIONS,
    Convolution,
    ConvolvedLayer,
    DisentangledLayer,
    Relative,
)
from fasttfm.nn.losses import token_loss
from fasttfm.nn.parts import layer_norm

# ---- the encoder -----------------------------------------------------------------------------------------------------


class DebertaV2Model(BertModel):
    """The encoder, called as ``BertModel`` is; it has no pooler."""

    config_class = DebertaV2Config

    def __init__(self, config: Any, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.names = names_of(config)
        layout = config.distances()
        self.distances = nn.Embedding(2 * layout.span, config.hidden_size) if config.relative_attention else None
        normed = "layer_norm" in [name.strip() for name in config.norm_rel_ebd.lower().split("|")]
        self.distance_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if normed else None
        self.finish()

    def embeddings_of(self, config: Any) -> Embeddings:
        width = config.embedding_size or config.hidden_size
        return Embeddings(
            config.vocab_size,
            width,
            config.max_position_embeddings if config.position_biased_input else 0,
            config.type_vocab_size,
            eps=config.layer_norm_eps,
            dropout=config.hidden_dropout_prob,
            padding_idx=config.pad_token_id,
            output_width=None if width == config.hidden_size else config.hidden_size,
            norm_last=True,
        )

    def layers_of(self, config: Any) -> list[Any]:
        options: dict[str, Any] = {
            "distances": config.distances(),
            "activation": config.hidden_act,
            "dropout": config.hidden_dropout_prob,
            "attention_dropout": config.attention_probs_dropout_prob,
            "eps": config.layer_norm_eps,
        }
        sizes = (config.hidden_size, config.num_attention_heads, config.intermediate_size)
        layers = [DisentangledLayer(*sizes, **options) for _ in range(config.num_hidden_layers)]
        if config.conv_kernel_size:
            layers[0] = ConvolvedLayer(*sizes, **options)
            kernel = (config.conv_kernel_size, config.conv_groups, config.conv_act)
            layers[0].convolution = Convolution(sizes[0], *kernel, config.hidden_dropout_prob, config.layer_norm_eps)
        return layers

    def encode_packed(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *others: Any,
        **layout: Any,
    ) -> Encoded:
        segments = None if self.embeddings.segment is None else token_type_ids  # tokenizers give them to all models
        return super().encode_packed(input_ids, attention_mask, segments, *others, **layout)

    def positions(
        self, input_ids: Tensor, ids: Tensor, position_ids: Tensor | None, batch: PackedBatch
    ) -> Tensor | None:
        """The positions; None without a table of positions. Attention reads distances in the batch in any case."""
        return None if self.embeddings.position is None else super().positions(input_ids, ids, position_ids, batch)

    def relative(self, batch: PackedBatch) -> Relative:
        """The distances of a batch."""
        longest = batch.max_seqlen if batch.shape is None else batch.shape[1]
        layout = self.config.distances()
        rows = ops.log_distance_rows(longest, layout.span, layout.farthest, device=batch.cu_seqlens.device)
        if self.distances is None:
            return Relative(batch, None, rows)
        table = self.distances.weight
        return Relative(batch, table if self.distance_norm is None else layer_norm(self.distance_norm, table), rows)

    def run_layers(self, x: Tensor, batch: PackedBatch, hidden_states: list[Tensor] | None) -> Tensor:
        options: dict[str, Any] = {"hidden_states": hidden_states, "relative": self.relative(batch)}
        states: Tensor = self.encoder(x, batch.cu_seqlens, batch.max_seqlen, **options)
        return states

    def attention_options(self, batch: PackedBatch, longest: int, **others: Any) -> dict[str, Any]:
        return {"relative": self.relative(batch)}


# ---- heads -----------------------------------------------------------------------------------------------------------


class DebertaV2Head(BertHead):
    """A model around the encoder."""

    config_class, encoder_class = DebertaV2Config, DebertaV2Model

    def names_of(self, config: Any) -> Names:
        return names_of(config)

    def lm_head_of(self, config: Any) -> MaskedLMHead:
        width = config.embedding_size if config.legacy else None
        sizes = (config.hidden_size, config.vocab_size)
        return MaskedLMHead(*sizes, embedding_width=width, activation=config.hidden_act, eps=config.layer_norm_eps)

    def tied(self) -> dict[str, str]:
        if "lm_head" in self._modules and not self.config.legacy:  # the paper's head reads the word table in any case
            return {"lm_head.decoder.weight": "deberta.embeddings.word.weight"}
        return super().tied()


class DebertaV2ForMaskedLM(DebertaV2Head, BertForMaskedLM):
    """Predicts masked tokens."""


class DebertaV2ForTokenClassification(DebertaV2Head, BertForTokenClassification):
    """Labels tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)


class DebertaV2ForQuestionAnswering(DebertaV2Head, BertForQuestionAnswering):
    """Finds the span that answers a question."""


class PooledHead(DebertaV2Head):
    """A model that reads the first token through a dense layer of its own."""

    pooler: ClassVar[bool] = False  # the encoder has none

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.function = FUNCTIONS[config.pooler_hidden_act]
        self.pooler_dropout = nn.Dropout(config.pooler_dropout)
        self.summary = nn.Linear(config.hidden_size, config.hidden_size)
        self.finish()

    def summarise(self, encoded: Encoded) -> Tensor:
        """[sequences, C]"""
        summary: Tensor = self.dropout(self.function(self.summary(self.pooler_dropout(encoded.first_tokens()))))
        return summary


class DebertaV2ForSequenceClassification(PooledHead, BertForSequenceClassification):
    """Labels sequences."""

    def classify(self, encoded: Encoded) -> Tensor:
        logits: Tensor = self.classifier(self.summarise(encoded))
        return logits

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """That of transformers: several labels of a sequence are probabilities, and a negative class is ignored."""
        if self.config.problem_type is not None or logits.shape[-1] == 1:
            return super().loss(logits, labels)
        if labels.numel() == len(logits):
            return token_loss(logits, torch.where(labels < 0, -100, labels).long().flatten())
        return -(logits.float().log_softmax(-1) * labels).sum(-1).mean()


class DebertaV2ForMultipleChoice(PooledHead, BertForMultipleChoice):
    """Chooses between continuations."""


FAMILY = Family(
    "DeBERTa",
    DebertaV2Config,
    {
        Head.NONE: DebertaV2Model,
        Head.MASKED_LM: DebertaV2ForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: DebertaV2ForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: DebertaV2ForTokenClassification,
        Head.QUESTION_ANSWERING: DebertaV2ForQuestionAnswering,
        Head.MULTIPLE_CHOICE: DebertaV2ForMultipleChoice,
    },
    tokenizer="unigram",
)
