"""Qwen3 (Yang et al., 2025), as an embedding model and a reranker (Zhang et al., 2025): Llama's causal network with an
RMSNorm of each head of queries and keys. A text's vector is the state of its last token.

Classes, arguments, outputs and checkpoints are those of transformers. Internally a batch is packed. ``fasttfm
generate`` does not take it, because there is no KV cache for rotary layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from fasttfm.models.checkpoint_names import rule
from fasttfm.models.family import Family, Head
from fasttfm.models.gpt import predict
from fasttfm.models.outputs import ClassifierOutput, LMOutput
from fasttfm.models.rotary import RotaryConfig, RotaryHead, RotaryModel
from fasttfm.models.text_model import Layout
from fasttfm.nn import CausalLMHead
from fasttfm.nn.losses import classification_loss

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class Qwen3Config(RotaryConfig):
    model_type: ClassVar[str] = "qwen3"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {
            "num_hidden_layers": 2,
            "hidden_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "intermediate_size": 256,
        },
        "0.6b": {},
        "4b": {
            "num_hidden_layers": 36,
            "hidden_size": 2560,
            "num_attention_heads": 32,
            "intermediate_size": 9728,
        },
    }

    vocab_size: int = 151669
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    bos_token_id: int | None = 151643
    eos_token_id: int | list[int] | None = 151643


class Qwen3Model(RotaryModel):
    """The network, called as ``BertModel`` is, without segments."""

    config_class, causal, head_norm = Qwen3Config, True, True
    head_rules = (rule("lm_head.decoder", "lm_head"), rule("score", "score"))


class Qwen3Head(RotaryHead):
    """A model around the network."""

    config_class, encoder_class = Qwen3Config, Qwen3Model


class Qwen3ForCausalLM(Qwen3Head):
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


class Qwen3ForSequenceClassification(Qwen3Head):
    """Labels sequences by their last token that is not ``config.pad_token_id``; a reranker has one label."""

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


FAMILY = Family(
    "Qwen3",
    Qwen3Config,
    {Head.NONE: Qwen3Model, Head.SEQUENCE_CLASSIFICATION: Qwen3ForSequenceClassification},
    tokenizer="bpe",
    template=True,
)
