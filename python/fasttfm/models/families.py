"""``FAMILIES``: every family of models, by its name on the command line. Everything that offers families reads this."""

from __future__ import annotations

from fasttfm.models import albert, bert, distilbert, electra, ernie_knowledge, gpt, gpt3, openai_gpt, roberta
from fasttfm.models.family import Family

_FILES = (bert, roberta, albert, electra, distilbert, ernie_knowledge, openai_gpt, gpt, gpt3)
FAMILIES: dict[str, Family] = {file.FAMILY.name: file.FAMILY for file in _FILES}


def family_of_type(model_type: object) -> Family | None:
    """The family whose checkpoints state ``model_type``."""
    return next((family for family in FAMILIES.values() if family.config.model_type == model_type), None)


def trained_on_text() -> dict[str, Family]:
    """The families that ``fasttfm pretrain`` trains."""
    return {name: family for name, family in FAMILIES.items() if family.trains_on_text}
