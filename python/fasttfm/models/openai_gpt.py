"""GPT-1 (Radford et al., 2018): a causal transformer LM, post-LN, fine-tuned on tasks that are written as one sequence.

    x_0 = word + position
    x_i = LN(y + MLP(y)),    y = LN(x_(i-1) + Attention(x_(i-1)))        i = 1 ... layers

A task's texts are joined into one sequence with three additional tokens, ``start``, ``delimiter`` and ``extract``, and
the last of them is classified (``task_sequence``). Fine-tuning adds an auxiliary causal LM loss:

    loss = classification + ``auxiliary_loss_weight`` * causal LM
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fasttfm.models.checkpoint_names import rule
from fasttfm.models.family import Family, Head
from fasttfm.models.gpt import (
    GPT2DoubleHeadsModel,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    GPTConfig,
    names_of,
)
from fasttfm.models.objectives import CausalLM
from fasttfm.models.outputs import AuxiliaryClassifierOutput
from fasttfm.nn.lm_heads import next_token_loss

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fasttfm.models.text_model import Layout


@dataclass
class OpenAIGPTConfig(GPTConfig):
    model_type: ClassVar[str] = "openai-gpt"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"n_layer": 2, "n_embd": 128, "n_head": 2},
        "base": {},
    }

    vocab_size: int = 40478
    n_positions: int = 512
    afn: str = "gelu"
    auxiliary_loss_weight: float = 0.5  # the weight of the causal LM loss in classification, if there are lm_labels

    @property
    def activation(self) -> str:
        return "gelu_new" if self.afn == "gelu" else self.afn  # the form with tanh goes by that name here


NAMES = names_of(rule("embeddings.word", "tokens_embed"), rule("embeddings.position", "positions_embed"))


class OpenAIGPTModel(GPT2Model):
    """Embeddings and causal layers, with LayerNorm after the blocks."""

    config_class, names, norm_first = OpenAIGPTConfig, NAMES, False


class OpenAIGPTLMHeadModel(GPT2LMHeadModel):
    config_class, names, encoder_class = OpenAIGPTConfig, NAMES, OpenAIGPTModel


class OpenAIGPTDoubleHeadsModel(GPT2DoubleHeadsModel):
    config_class, names, encoder_class = OpenAIGPTConfig, NAMES, OpenAIGPTModel


class OpenAIGPTForSequenceClassification(GPT2ForSequenceClassification):
    """Labels sequences by their last token. With ``lm_labels``, which are ``input_ids`` or -100 for tokens that are not
    predicted, the causal LM loss is added, with the word table as the decoder."""

    config_class, names, encoder_class = OpenAIGPTConfig, NAMES, OpenAIGPTModel

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        lm_labels: Tensor | None = None,
        num_orders: int = 1,
        **layout: Unpack[Layout],
    ) -> AuxiliaryClassifierOutput:
        encoded = self.encoder.encode(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        logits, loss = self.classify(encoded, input_ids, labels, num_orders)
        classification, words = loss, None
        if loss is not None and lm_labels is not None:
            batch, table = encoded.batch, self.transformer.embeddings.word.weight
            words = next_token_loss(encoded.x, table, None, batch.pack(lm_labels), batch.cu_seqlens)
            loss = loss + self.config.auxiliary_loss_weight * words
        supervised = None if words is None else classification
        return AuxiliaryClassifierOutput(loss, logits, encoded.hidden_states, encoded.attentions, supervised, words)


def task_sequence(*texts: Sequence[int], start: int, delimiter: int, extract: int) -> list[int]:
    """Joins the texts of a task to one sequence, as in GPT-1's fine-tuning: start, the texts with delimiters between
    them, extract. The texts are premise and hypothesis, a context and an answer, or a single text."""
    ids = [start]
    for index, text in enumerate(texts):
        ids += [delimiter, *text] if index else text
    return [*ids, extract]


FAMILY = Family(
    "GPT",
    OpenAIGPTConfig,
    {
        Head.NONE: OpenAIGPTModel,
        Head.PRETRAINING: OpenAIGPTLMHeadModel,
        Head.CAUSAL_LM: OpenAIGPTLMHeadModel,
        Head.SEQUENCE_CLASSIFICATION: OpenAIGPTForSequenceClassification,
        Head.MULTIPLE_CHOICE: OpenAIGPTDoubleHeadsModel,
    },
    command="gpt",
    pretraining=CausalLM,
    sequences="causal",
    tokenizer="bpe",
    positions="n_positions",
)
