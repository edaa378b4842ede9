"""The decoder of Ettin (Weller et al., 2025): ModernBERT's network with causal attention, pre-trained on next tokens.

A token of a local layer attends to the last ``local_attention / 2`` tokens, itself included. The head has ModernBERT's
dense layer, activation and LayerNorm before the decoder.

Classes, arguments, outputs and checkpoints are those of transformers. Internally a batch is packed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from fasttfm.models.checkpoint_names import rule
from fasttfm.models.family import Family, Head
from fasttfm.models.gpt import NextTokenLoss
from fasttfm.models.modernbert import NAMES as ENCODER_NAMES
from fasttfm.models.modernbert import ModernBertConfig, ModernBertHead, ModernBertModel, PredictionHead
from fasttfm.models.rotary_decoders import LastTokenLabels
from fasttfm.nn import CausalLMHead
from fasttfm.nn.plain import is_plain, register_plain_class


@dataclass
class ModernBertDecoderConfig(ModernBertConfig):
    model_type: ClassVar[str] = "modernbert-decoder"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": ModernBertConfig.sizes["tiny"],
        "17m": {"num_hidden_layers": 7, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 384},
        "32m": {"num_hidden_layers": 10, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 576},
        "68m": {"num_hidden_layers": 19, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 768},
        "150m": {},
        "400m": ModernBertConfig.sizes["large"],
        "1b": {"num_hidden_layers": 28, "hidden_size": 1792, "num_attention_heads": 28, "intermediate_size": 3840},
    }

    bos_token_id: int | None = 50281
    eos_token_id: int | list[int] | None = 50282


_LAYER = "layers.*"
_PROJECTIONS = rule("encoder.layers.*.qkv", *(f"{_LAYER}.attn.{part}_proj" for part in "qkv"))
NAMES = replace(
    ENCODER_NAMES,
    base=tuple(_PROJECTIONS if base_rule.ours == _PROJECTIONS.ours else base_rule for base_rule in ENCODER_NAMES.base),
    heads=(
        rule("lm_head.decoder", "decoder"),
        rule("lm_head.head", "lm_head"),
        rule("head", "head"),
        rule("classifier", "classifier"),
    ),
)


class ModernBertDecoderModel(ModernBertModel):
    """The network, called as ``BertModel`` is, without segments."""

    config_class, names = ModernBertDecoderConfig, NAMES

    def local_window(self, config: Any) -> tuple[int, int]:
        return config.local_attention // 2 - 1, 0

    def global_window(self) -> tuple[int | None, int] | None:
        return None, 0


class DecoderHead(CausalLMHead):
    """A ``PredictionHead`` before the decoder."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.vocab_size, bias=config.decoder_bias)
        self.head = PredictionHead(config)

    def transform(self, x: Tensor) -> Tensor:
        predicted: Tensor = self.head(x)
        return predicted


register_plain_class(DecoderHead, lambda head: is_plain(head._modules["decoder"]))


class ModernBertDecoderHead(ModernBertHead):
    """A model around the network."""

    config_class, names, untied_names = ModernBertDecoderConfig, NAMES, NAMES
    encoder_class = ModernBertDecoderModel


class ModernBertDecoderForCausalLM(NextTokenLoss, ModernBertDecoderHead):
    """Predicts the next tokens: ``labels`` are ``input_ids``, with -100 for tokens that are not predicted."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head = DecoderHead(config)
        self.finish()


class ModernBertDecoderForSequenceClassification(LastTokenLabels, ModernBertDecoderHead):
    """Labels sequences by their last token that is not ``config.pad_token_id``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.head = PredictionHead(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels, bias=config.classifier_bias)
        self.finish()

    def score(self, states: Tensor) -> Tensor:
        """The logits [sequences, labels] of the states of last tokens."""
        logits: Tensor = self.classifier(self.dropout(self.head(states)))
        return logits


FAMILY = Family(
    "ModernBERT decoder",
    ModernBertDecoderConfig,
    {
        Head.NONE: ModernBertDecoderModel,
        Head.CAUSAL_LM: ModernBertDecoderForCausalLM,
        Head.SEQUENCE_CLASSIFICATION: ModernBertDecoderForSequenceClassification,
    },
    tokenizer="bpe",
    template=True,
)
