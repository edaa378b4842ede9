"""Which model opens a checkpoint directory for a task, and what all of them have under the same names."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from fasttfm import models
from fasttfm.models.checkpoint_files import CONFIG, CheckpointError, read_json
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import TextModel

# How the classes of a family begin, by config.json's model_type, and how those for a task end.
_FAMILIES = {
    "bert": "Bert",
    "roberta": "Roberta",
    "albert": "Albert",
    "electra": "Electra",
    "distilbert": "DistilBert",
    "openai-gpt": "OpenAIGPT",
    "gpt2": "GPT2",
    "gpt3": "GPT3",
}
_HEADS = {
    "classify": ("ForSequenceClassification",),
    "pair": ("ForSequenceClassification",),
    "tag": ("ForTokenClassification",),
    "qa": ("ForQuestionAnswering",),
    "choice": ("ForMultipleChoice", "DoubleHeadsModel"),
    "masked words": ("ForMaskedLM",),
    "next words": ("LMHeadModel",),
    "vectors": ("Model",),
}
CAUSAL = ("openai-gpt", "gpt2", "gpt3")


def family_of(directory: str | Path) -> str:
    """The ``model_type`` that a checkpoint directory states."""
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected a directory with a model, there is none")
    family = read_json(path / CONFIG).get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise CheckpointError(f"{path / CONFIG}: model_type: expected one of {', '.join(_FAMILIES)}, got {family!r}")
    return family


def model_class(family: str, task: str) -> type[PretrainedModel]:
    """The family's class with the task's head."""
    found = _class(family, task)
    if found is None:
        able = [other for other in _FAMILIES if _class(other, task) is not None]
        raise ValueError(f"{task}: expected a model of {', '.join(able)}; {family} has no head for it")
    return found


def open_model(directory: str | Path, task: str, **changes: Any) -> PretrainedModel:
    """The checkpoint with the task's head, which is randomly initialized, with a warning, if the checkpoint has none.
    Vectors need no pooler, which is all that a model without a head may lack."""
    model_cls = model_class(family_of(directory), task)
    with warnings.catch_warnings():
        if task == "vectors":
            warnings.simplefilter("ignore")
        return checked(model_cls.from_pretrained(directory, **changes), directory)


def checked(model: PretrainedModel, directory: str | Path) -> PretrainedModel:
    """The model, unless a parameter is not finite: everything computed with it would be worthless."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise CheckpointError(f"{directory}: {name}: expected finite numbers, got inf or NaN")
    return model


def base_of(model: PretrainedModel) -> TextModel:
    """The model without its head."""
    base = model if model.base else getattr(model, model.names.prefix)
    assert isinstance(base, TextModel)
    return base


def longest_input(config: Any) -> int:
    """The most tokens that the model has positions for."""
    if hasattr(config, "n_positions"):
        return int(config.n_positions)
    unused = config.pad_token_id + 1 if config.model_type == "roberta" else 0  # its positions start after the padding's
    return int(config.max_position_embeddings) - unused


def _class(family: str, task: str) -> type[PretrainedModel] | None:
    names = (f"{_FAMILIES[family]}{ending}" for ending in _HEADS[task])
    return next((getattr(models, name) for name in names if hasattr(models, name)), None)
