"""The heads of causal networks with rotary positions (``rotary.py``): Llama's and Qwen3's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fasttfm.models.checkpoint_names import rule
from fasttfm.models.gpt import predict
from fasttfm.models.outputs import ClassifierOutput, LMOutput
from fasttfm.models.rotary import RotaryHead
from fasttfm.models.text_model import Layout
from fasttfm.nn import CausalLMHead
from fasttfm.nn.losses import classification_loss

if TYPE_CHECKING:
    from typing_extensions import Unpack

DECODER_RULES = (rule("lm_head.decoder", "lm_head"), rule("score", "score"))


class RotaryForCausalLM(RotaryHead):
    """Predicts the next tokens: ``labels`` are ``input_ids``, with -100 for tokens that are not predicted."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lm_head = CausalLMHead(config.hidden_size, config.vocab_size)
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        output_logits: bool = False,
        **layout: Unpack[Layout],
    ) -> LMOutput:
        encoded = self.encoder.encode(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        loss, logits = predict(self.lm_head, encoded, labels, output_logits)
        return LMOutput(loss, logits, **encoded.returned())


class RotaryForSequenceClassification(RotaryHead):
    """Labels sequences by their last token that is not ``config.pad_token_id``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **layout: Unpack[Layout],
    ) -> ClassifierOutput:
        encoded = self.encoder.encode(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        batch, padding = encoded.batch, self.config.pad_token_id
        states = batch.last_tokens(encoded.x, None if padding is None else batch.pack(input_ids) != padding)
        logits = self.score(states)
        loss = None if labels is None else classification_loss(logits, labels, self.config.problem_type)
        return ClassifierOutput(loss, logits, **encoded.returned())
