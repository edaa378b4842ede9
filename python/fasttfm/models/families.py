"""``FAMILIES``: all families of models by their names on the command line. This is the only list of families."""

from __future__ import annotations

from typing import Any, NamedTuple

from fasttfm.models import (
    albert,
    bert,
    camembert,
    deberta_v2,
    distilbert,
    electra,
    ernie_knowledge,
    eurobert,
    gemma3,
    gpt,
    gpt3,
    gte,
    jina_embeddings_v3,
    llama,
    modernbert,
    modernbert_decoder,
    mpnet,
    mt5,
    nomic_bert,
    openai_gpt,
    qwen3,
    roberta,
    t5,
    vit,
    xlm_roberta,
    xlnet,
)
from fasttfm.models.family import Family, Head
from fasttfm.models.objectives import (
    CausalLM,
    MaskedLM,
    MaskedLMWithSentences,
    NextSentence,
    Pretraining,
    SentenceOrder,
)

_ROBERTAS = (roberta, xlm_roberta, camembert, mpnet)
_ROTARY = (modernbert, eurobert, nomic_bert, gte, jina_embeddings_v3)
_ENCODERS = (bert, *_ROBERTAS, albert, electra, distilbert, *_ROTARY, deberta_v2, xlnet, t5, mt5, ernie_knowledge)
_FILES = (*_ENCODERS, openai_gpt, gpt, gpt3, llama, qwen3, gemma3, modernbert_decoder, vit)
FAMILIES: dict[str, Family] = {file.FAMILY.name: file.FAMILY for file in _FILES}


def family_of_type(model_type: object) -> Family | None:
    """The family whose checkpoints state ``model_type``."""
    return next((family for family in FAMILIES.values() if family.config.model_type == model_type), None)


def longest_input(config: Any) -> int:
    """The number of tokens that the model has positions for."""
    family = family_of_type(config.model_type)
    assert family is not None
    unused = config.pad_token_id + 1 if family.unused_positions else 0  # positions start at pad_token_id + 1
    return int(getattr(config, family.positions)) - unused


def trained_on_text() -> dict[str, Family]:
    """The families that ``fasttfm pretrain`` trains."""
    return {name: family for name, family in FAMILIES.items() if family.trains_on_text}


class TextObjective(NamedTuple):
    """A pre-training objective of a family: the model that it trains, its losses, and the sequences that it reads (a
    kind of ``data.SequenceFormat``)."""

    head: Head
    module: type[Pretraining]
    sequences: str


def objectives_of(family: Family) -> dict[str, TextObjective]:
    """The objectives that a family can be pre-trained on, by name; its own is the first."""
    objectives: dict[str, TextObjective] = {}
    if family.pretraining is not None and family.sequences is not None:
        objectives[family.pretraining.name] = TextObjective(Head.PRETRAINING, family.pretraining, family.sequences)
        if issubclass(family.pretraining, MaskedLMWithSentences):
            for module, sequences in ((NextSentence, "nsp"), (SentenceOrder, "sop")):
                objectives.setdefault(module.name, TextObjective(Head.PRETRAINING, module, sequences))
    if Head.MASKED_LM in family.models:
        objectives.setdefault("mlm", TextObjective(Head.MASKED_LM, MaskedLM, "single"))
    if Head.CAUSAL_LM in family.models:
        objectives.setdefault("clm", TextObjective(Head.CAUSAL_LM, CausalLM, "causal"))
    return objectives
