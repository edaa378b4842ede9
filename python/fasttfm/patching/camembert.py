"""CamemBERT's modules: RoBERTa's under other names."""

from __future__ import annotations

from transformers.models.camembert import modeling_camembert as theirs

from fasttfm.patching import heads, packing, parts, roberta


class CamembertEmbeddings(roberta.PositionsAfterPadding, theirs.CamembertEmbeddings): ...


class CamembertSelfAttention(parts.SelfAttention, theirs.CamembertSelfAttention): ...


class CamembertSelfOutput(parts.AddNorm, theirs.CamembertSelfOutput): ...


class CamembertIntermediate(parts.Intermediate, theirs.CamembertIntermediate): ...


class CamembertOutput(parts.AddNorm, theirs.CamembertOutput): ...


class CamembertEncoder(packing.BertLayers, theirs.CamembertEncoder): ...


class CamembertLMHead(roberta.LMHead, theirs.CamembertLMHead): ...


class CamembertForMaskedLM(roberta.ForMaskedLM, theirs.CamembertForMaskedLM):
    forward = heads.loss_only(theirs.CamembertForMaskedLM)


MODEL = theirs.CamembertPreTrainedModel
CLASSES = (
    CamembertEmbeddings,
    CamembertSelfAttention,
    CamembertSelfOutput,
    CamembertIntermediate,
    CamembertOutput,
    CamembertEncoder,
    CamembertLMHead,
    CamembertForMaskedLM,
)
LEFT: dict[str, str] = {}
