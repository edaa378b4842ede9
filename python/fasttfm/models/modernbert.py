"""ModernBERT (Warner et al., 2024): a pre-LN encoder with rotary positions, local layers and gated feed-forward blocks.

    x_0 = LN(word)
    x_i = y + W (gelu(gate) * up),  (gate, up) = V LN(y),  y = x_(i-1) + Attention(LN(x_(i-1)))        i = 1 ... layers
    x = LN(x_layers)

The first layer has no LayerNorm before its attention. Every third layer attends to the whole sequence, the others to
``local_attention / 2`` tokens on each side. Queries and keys are rotated by their positions, with another base of
wavelengths in each kind of layer. Linear layers and LayerNorms have no biases.

Classes, arguments, outputs and checkpoints are those of transformers. Internally a batch is packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from fasttfm.models.bert import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertHead,
    BertModel,
    EncoderConfig,
)
from fasttfm.models.checkpoint_names import Names, rule
from fasttfm.models.config import ModelConfig
from fasttfm.models.family import Family, Head
from fasttfm.models.objectives import MaskedLM
from fasttfm.models.rotary import FULL, LOCAL, RotaryPositions, layer_kinds, rotation_of_kind, sequence_means
from fasttfm.models.text_model import Encoded
from fasttfm.nn import Embeddings, MaskedLMHead, PackedTransformer, RotaryLayer, RotaryTransformer
from fasttfm.nn.parts import known_activation, masked_lm_transform
from fasttfm.nn.rotation import Theta


@dataclass
class ModernBertConfig(ModelConfig):
    """Fields have transformers' names; the encoder reads them by BERT's names."""

    model_type: ClassVar[str] = "modernbert"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 192},
        "base": {},
        "large": {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2624},
    }

    vocab_size: int = 50368
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    hidden_activation: str = "gelu"
    max_position_embeddings: int = 8192
    initializer_range: float = 0.02
    norm_eps: float = 1e-5
    norm_bias: bool = False
    pad_token_id: int | None = 50283
    attention_bias: bool = False
    attention_dropout: float = 0.0
    local_attention: int = 128
    global_attn_every_n_layers: int = 3
    global_rope_theta: float = 160_000.0
    local_rope_theta: float | None = 10_000.0  # global_rope_theta if None
    embedding_dropout: float = 0.0
    mlp_bias: bool = False
    mlp_dropout: float = 0.0
    decoder_bias: bool = True
    classifier_pooling: str = "cls"
    classifier_dropout: float = 0.0
    classifier_bias: bool = False
    classifier_activation: str = "gelu"

    hidden_act = property(lambda self: self.hidden_activation)
    hidden_dropout_prob = property(lambda self: self.embedding_dropout)
    attention_probs_dropout_prob = property(lambda self: self.attention_dropout)
    type_vocab_size = property(lambda self: 0)
    layer_norm_eps = property(lambda self: self.norm_eps)
    recompute = property(lambda self: False)
    keep_activation = property(lambda self: False)

    def head_dropout(self) -> float:
        return self.classifier_dropout

    def layer_kinds(self) -> list[str]:
        """``full_attention`` or ``sliding_attention`` for each layer."""
        every = self.global_attn_every_n_layers
        return layer_kinds(self.extra, self.num_hidden_layers, lambda layer: layer % every != 0)

    def rotation(self, kind: str) -> Theta:
        """The rotation in a kind of layer."""
        local = self.global_rope_theta if self.local_rope_theta is None else self.local_rope_theta
        return rotation_of_kind(self, kind, self.global_rope_theta if kind == FULL else local)


_LAYER = "layers.*"
NAMES = Names(
    prefix="model",
    base=(
        rule("embeddings.word", "embeddings.tok_embeddings"),
        rule("embeddings.norm", "embeddings.norm"),
        rule("encoder.layers.*.norm1", f"{_LAYER}.attn_norm"),
        rule("encoder.layers.*.qkv", f"{_LAYER}.attn.Wqkv"),
        rule("encoder.layers.*.out", f"{_LAYER}.attn.Wo"),
        rule("encoder.layers.*.norm2", f"{_LAYER}.mlp_norm"),
        rule("encoder.layers.*.up", f"{_LAYER}.mlp.Wi"),
        rule("encoder.layers.*.down", f"{_LAYER}.mlp.Wo"),
        rule("encoder.final_norm", "final_norm"),
    ),
    heads=(
        rule("lm_head.dense", "head.dense"),
        rule("lm_head.norm", "head.norm"),
        rule("lm_head.decoder", "decoder"),
        rule("head", "head"),
        rule("classifier", "classifier"),
        rule("qa_outputs", "classifier"),
    ),
)


class ModernBertModel(RotaryPositions, BertModel):
    """The encoder; called as ``BertModel`` is, without segments. It has no pooler."""

    config_class = ModernBertConfig
    names = NAMES

    def __init__(self, config: Any, add_pooling_layer: bool = False) -> None:
        super().__init__(config, add_pooling_layer=False)

    def embeddings_of(self, config: Any) -> Embeddings:
        return Embeddings(
            config.vocab_size,
            config.hidden_size,
            eps=config.norm_eps,
            norm_bias=config.norm_bias,
            dropout=config.embedding_dropout,
            padding_idx=config.pad_token_id,
        )

    def stack_of(self, config: Any) -> PackedTransformer:
        local, everywhere = self.local_window(config), self.global_window()
        layers = [
            RotaryLayer(
                config.hidden_size,
                config.num_attention_heads,
                config.intermediate_size,
                theta=config.rotation(kind),
                window=local if kind == LOCAL else everywhere,
                first=number == 0,
                activation=config.hidden_activation,
                dropout=config.attention_dropout,
                intermediate_dropout=config.mlp_dropout,
                eps=config.norm_eps,
                attention_bias=config.attention_bias,
                feed_forward_bias=config.mlp_bias,
                norm_bias=config.norm_bias,
            )
            for number, kind in enumerate(config.layer_kinds())
        ]
        final_norm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
        return RotaryTransformer(layers, final_norm, config.max_position_embeddings)

    def local_window(self, config: Any) -> tuple[int, int]:
        """How far before and after itself a token of a local layer attends."""
        return config.local_attention // 2, config.local_attention // 2

    def global_window(self) -> tuple[int | None, int] | None:
        """The same in the other layers; None for no limit."""
        return None

    def pool(self, encoded: Encoded) -> Tensor:
        """[sequences, C]: the first token's state, or the mean over a sequence."""
        batch = encoded.batch
        if self.config.classifier_pooling == "cls":
            return batch.first_tokens(encoded.x)
        if self.config.classifier_pooling != "mean":
            got = repr(self.config.classifier_pooling)
            raise ValueError(f"{type(self).__name__}: classifier_pooling: expected cls or mean, got {got}")
        return sequence_means(encoded.x, batch)


# ---- heads -----------------------------------------------------------------------------------------------------------


class PredictionHead(nn.Module):
    """Dense layer, activation and LayerNorm, before a classifier."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.activation = known_activation("PredictionHead", config.classifier_activation)
        self.dense = nn.Linear(width, width, bias=config.classifier_bias)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)

    def forward(self, x: Tensor) -> Tensor:
        return masked_lm_transform(self.dense, self.activation, self.norm, x)


class ModernBertHead(BertHead):
    """A model around the encoder."""

    config_class, names, untied_names = ModernBertConfig, NAMES, NAMES
    encoder_class = ModernBertModel

    def lm_head_of(self, config: Any) -> MaskedLMHead:
        return MaskedLMHead(
            config.hidden_size,
            config.vocab_size,
            activation=config.classifier_activation,
            eps=config.norm_eps,
            dense_bias=config.classifier_bias,
            norm_bias=config.norm_bias,
            decoder_bias=config.decoder_bias,
        )


class ModernBertForMaskedLM(ModernBertHead, BertForMaskedLM):
    """Predicts masked tokens; called as ``BertForMaskedLM`` is."""


class ModernBertClassifier(ModernBertHead):
    """A model with a classifier after a ``PredictionHead``."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.head = PredictionHead(config)
        self.finish()

    def predict(self, x: Tensor) -> Tensor:
        predicted: Tensor = self.dropout(self.head(x))
        return predicted


class ModernBertForSequenceClassification(ModernBertClassifier, BertForSequenceClassification):
    """Labels sequences, by their first token or their mean (``classifier_pooling``)."""

    def classify(self, encoded: Encoded) -> Tensor:
        logits: Tensor = self.classifier(self.predict(self.encoder.pool(encoded)))
        return logits


class ModernBertForMultipleChoice(ModernBertClassifier, BertForMultipleChoice):
    """Chooses between continuations."""

    def summarise(self, encoded: Encoded) -> Tensor:
        return self.predict(self.encoder.pool(encoded))


class ModernBertForTokenClassification(ModernBertClassifier, BertForTokenClassification):
    """Labels tokens; those with label -100 do not count."""

    def summarise(self, encoded: Encoded) -> Tensor:
        return self.predict(encoded.x)


class ModernBertForQuestionAnswering(ModernBertClassifier, BertForQuestionAnswering):
    """Finds the span that answers a question."""

    def spans(self, encoded: Encoded) -> Tensor:
        logits: Tensor = self.qa_outputs(self.predict(encoded.x))
        return logits


FAMILY = Family(
    "ModernBERT",
    ModernBertConfig,
    {
        Head.NONE: ModernBertModel,
        Head.MASKED_LM: ModernBertForMaskedLM,
        Head.SEQUENCE_CLASSIFICATION: ModernBertForSequenceClassification,
        Head.TOKEN_CLASSIFICATION: ModernBertForTokenClassification,
        Head.QUESTION_ANSWERING: ModernBertForQuestionAnswering,
        Head.MULTIPLE_CHOICE: ModernBertForMultipleChoice,
        Head.PRETRAINING: ModernBertForMaskedLM,
    },
    pretraining=MaskedLM,
    sequences="single",
    tokenizer="wordpiece",
    patching="modernbert",
)
