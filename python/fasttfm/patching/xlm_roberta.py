"""XLM-RoBERTa's modules: RoBERTa's under other names."""

from __future__ import annotations

from transformers.models.xlm_roberta import modeling_xlm_roberta as theirs

from fasttfm.patching import heads, packing, parts, roberta


class XLMRobertaEmbeddings(roberta.PositionsAfterPadding, theirs.XLMRobertaEmbeddings): ...


class XLMRobertaSelfAttention(parts.SelfAttention, theirs.XLMRobertaSelfAttention): ...


class XLMRobertaSelfOutput(parts.AddNorm, theirs.XLMRobertaSelfOutput): ...


class XLMRobertaIntermediate(parts.Intermediate, theirs.XLMRobertaIntermediate): ...


class XLMRobertaOutput(parts.AddNorm, theirs.XLMRobertaOutput): ...


class XLMRobertaEncoder(packing.BertLayers, theirs.XLMRobertaEncoder): ...


class XLMRobertaLMHead(roberta.LMHead, theirs.XLMRobertaLMHead): ...


class XLMRobertaForMaskedLM(roberta.ForMaskedLM, theirs.XLMRobertaForMaskedLM):
    forward = heads.loss_only(theirs.XLMRobertaForMaskedLM)


MODEL = theirs.XLMRobertaPreTrainedModel
CLASSES = (
    XLMRobertaEmbeddings,
    XLMRobertaSelfAttention,
    XLMRobertaSelfOutput,
    XLMRobertaIntermediate,
    XLMRobertaOutput,
    XLMRobertaEncoder,
    XLMRobertaLMHead,
    XLMRobertaForMaskedLM,
)
LEFT: dict[str, str] = {}
