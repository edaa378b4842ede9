"""ELECTRA's modules."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.electra import modeling_electra as theirs

from fasttfm.patching import heads, packing, parts


class ElectraEmbeddings(parts.Embeddings, theirs.ElectraEmbeddings): ...


class ElectraSelfAttention(parts.SelfAttention, theirs.ElectraSelfAttention): ...


class ElectraSelfOutput(parts.AddNorm, theirs.ElectraSelfOutput): ...


class ElectraIntermediate(parts.Intermediate, theirs.ElectraIntermediate): ...


class ElectraOutput(parts.AddNorm, theirs.ElectraOutput): ...


class ElectraEncoder(packing.BertLayers, theirs.ElectraEncoder): ...


class ElectraGeneratorPredictions(parts.HeadTransform, theirs.ElectraGeneratorPredictions): ...


class ElectraDiscriminatorPredictions(parts.Patched, theirs.ElectraDiscriminatorPredictions):
    does = "discriminator's head: bias and activation in one pass"

    def forward(self, discriminator_hidden_states: Tensor) -> Tensor:
        hidden = parts.linear_activation(self.dense, self.activation, discriminator_hidden_states)
        logits: Tensor = self.dense_prediction(hidden).squeeze(-1)
        return logits


class ElectraForMaskedLM(heads.MaskedLMLoss, theirs.ElectraForMaskedLM):
    forward = heads.loss_only(theirs.ElectraForMaskedLM)

    def modules_before_loss(self) -> tuple[Any, ...]:
        return self.generator_predictions, self.generator_lm_head

    def vocabulary_layer(self) -> Any:
        return self.generator_lm_head

    def before_vocabulary(self, x: Tensor) -> Tensor:
        y: Tensor = self.generator_predictions(x)
        return y


MODEL = theirs.ElectraPreTrainedModel
CLASSES = (
    ElectraEmbeddings,
    ElectraSelfAttention,
    ElectraSelfOutput,
    ElectraIntermediate,
    ElectraOutput,
    ElectraEncoder,
    ElectraGeneratorPredictions,
    ElectraDiscriminatorPredictions,
    ElectraForMaskedLM,
)
LEFT: dict[str, str] = {}
