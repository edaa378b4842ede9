"""RoBERTa's modules, and the parts of them that XLM-RoBERTa and MPNet share."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.activations import gelu
from transformers.models.roberta import modeling_roberta as theirs

from fasttfm.patching import heads, packing, parts


class PositionsAfterPadding(parts.Embeddings):
    def default_positions(self: Any, input_ids: Tensor, past_key_values_length: int = 0) -> Tensor:
        """Positions start at pad_token_id + 1; padding has position pad_token_id."""
        return self.create_position_ids_from_input_ids(input_ids, self.padding_idx, past_key_values_length)


class LMHead(parts.Patched):
    does = parts.HeadTransform.does

    def forward(self: Any, features: Tensor, **kwargs: Any) -> Tensor:
        logits: Tensor = self.decoder(self.transform(features))
        return logits

    def transform(self: Any, x: Tensor) -> Tensor:
        return parts.masked_lm_transform(self.dense, gelu, self.layer_norm, x)


class ForMaskedLM(heads.MaskedLMLoss):
    def modules_before_loss(self: Any) -> tuple[Any, ...]:
        return (self.lm_head,)

    def vocabulary_layer(self: Any) -> Any:
        return self.lm_head.decoder

    def before_vocabulary(self: Any, x: Tensor) -> Tensor:
        y: Tensor = self.lm_head.transform(x)
        return y


class RobertaEmbeddings(PositionsAfterPadding, theirs.RobertaEmbeddings): ...


class RobertaSelfAttention(parts.SelfAttention, theirs.RobertaSelfAttention): ...


class RobertaSelfOutput(parts.AddNorm, theirs.RobertaSelfOutput): ...


class RobertaIntermediate(parts.Intermediate, theirs.RobertaIntermediate): ...


class RobertaOutput(parts.AddNorm, theirs.RobertaOutput): ...


class RobertaEncoder(packing.BertLayers, theirs.RobertaEncoder): ...


class RobertaLMHead(LMHead, theirs.RobertaLMHead): ...


class RobertaForMaskedLM(ForMaskedLM, theirs.RobertaForMaskedLM):
    forward = heads.loss_only(theirs.RobertaForMaskedLM)


MODEL = theirs.RobertaPreTrainedModel
CLASSES = (
    RobertaEmbeddings,
    RobertaSelfAttention,
    RobertaSelfOutput,
    RobertaIntermediate,
    RobertaOutput,
    RobertaEncoder,
    RobertaLMHead,
    RobertaForMaskedLM,
)
LEFT: dict[str, str] = {}
