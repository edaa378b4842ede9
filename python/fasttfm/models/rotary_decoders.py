"""The heads of causal networks with rotary positions (``rotary.py``): Llama's and Qwen3's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fasttfm.models.checkpoint_names import rule
from fasttfm.models.gpt import LastTokenScore, NextTokenLoss
from fasttfm.models.outputs import ClassifierOutput
from fasttfm.models.rotary import RotaryHead
from fasttfm.models.text_model import Layout
from fasttfm.nn import CausalLMHead

if TYPE_CHECKING:
    from typing_extensions import Unpack

DECODER_RULES = (rule("lm_head.decoder", "lm_head"), rule("score", "score"))


class RotaryForCausalLM(NextTokenLoss, RotaryHead):
    """Predicts the next tokens: ``labels`` are ``input_ids``, with -100 for tokens that are not predicted."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head = CausalLMHead(config.hidden_size, config.vocab_size)
        self.finish()


class LastTokenLabels(LastTokenScore):
    """The forward of models with an encoder and ``LastTokenScore``."""

    def forward(
        self: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **layout: Unpack[Layout],
    ) -> ClassifierOutput:
        encoded = self.encoder.encode(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        logits, loss = self.classify(encoded, input_ids, labels)
        return ClassifierOutput(loss, logits, **encoded.returned())


class RotaryForSequenceClassification(LastTokenLabels, RotaryHead):
    """Labels sequences by their last token that is not ``config.pad_token_id``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.finish()
