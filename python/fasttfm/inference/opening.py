"""Opens checkpoint directories of any family, and finds the parts that the models of all families have."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from fasttfm.models.adapters import adapter_directory, merge_adapter
from fasttfm.models.checkpoint_files import CONFIG, CheckpointError, read_json
from fasttfm.models.directories import checkpoint_directory
from fasttfm.models.families import FAMILIES, family_of_type
from fasttfm.models.family import Family, Head
from fasttfm.models.hub import Part
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import BaseModel, TextModel

TASK_KEY = "fasttfm_task"  # the key in config.json of the settings with which a model was fine-tuned


def checkpoint_of(directory: str | Path, head: Head = Head.NONE, *, part: Part = Part.WEIGHTS) -> Path:
    """The directory of the checkpoint in a directory or hub model (``checkpoint_directory``). Of ELECTRA's two models
    it is the generator for masked LM, otherwise the discriminator."""
    path = checkpoint_directory(directory, part)
    model = path / ("generator" if head is Head.MASKED_LM else "discriminator")
    return model if not (path / CONFIG).exists() and (model / CONFIG).is_file() else path


def family_of(directory: str | Path) -> Family:
    """The family that ``model_type`` of a checkpoint directory or hub model names."""
    path = checkpoint_of(directory, part=Part.CONFIG)
    for family in FAMILIES.values():  # the config files of original releases have no model_type
        if not (path / CONFIG).is_file() and any((path / name).is_file() for name in family.config.config_files):
            return family
    stated = read_json(path / CONFIG).get("model_type")
    stated_family = family_of_type(stated)
    if stated_family is None:
        known = ", ".join(family.config.model_type for family in FAMILIES.values())
        raise CheckpointError(f"{path / CONFIG}: model_type: expected one of {known}, got {stated!r}")
    return stated_family


def model_class(family: Family, head: Head, purpose: str | None = None) -> type[PretrainedModel]:
    """The family's model class with this head. ``purpose`` describes the head in error messages."""
    model = family.models.get(head)
    if model is None:
        able = ", ".join(other.config.model_type for other in FAMILIES.values() if head in other.models)
        got = f"{family.config.model_type} has no head for it"
        raise ValueError(f"{purpose or head.value}: expected a model of {able}; {got}")
    return model


def open_model(
    directory: str | Path, head: Head, *, trained: bool = False, adapter: str | Path | None = None, **changes: Any
) -> PretrainedModel:
    """Opens a checkpoint with the head, and adds an ``adapter`` (``adapter_directory``) to its weights. A head that the
    checkpoint lacks is randomly initialized with a warning, or raises CheckpointError with ``trained``. There is no
    warning for ``Head.NONE``, where only the pooler, which hidden states do not need, can be missing."""
    directory = checkpoint_of(directory, head)
    model_cls = model_class(family_of(directory), head)
    with warnings.catch_warnings():
        if trained or head is Head.NONE:
            warnings.simplefilter("ignore")
        model = checked(model_cls.from_pretrained(directory, **changes), directory)
    if adapter is not None:
        merge_adapter(model, adapter_directory(directory, adapter))
    return with_trained_head(model, directory, head.value) if trained else model


def open_with_stated_head(directory: str | Path, adapter: str | Path | None = None) -> PretrainedModel:
    """Opens a checkpoint with the head that its configuration names, or without a head if the family has no such
    one. ``adapter`` is that of ``open_model``."""
    family = family_of(directory)
    config: Any = family.config.from_pretrained(checkpoint_of(directory, part=Part.CONFIG))
    named = config.extra.get("architectures") or []
    head = next((head for head, kind in family.models.items() if kind.__name__ in named), Head.NONE)
    return open_model(directory, head, adapter=adapter)


def checked(model: PretrainedModel, directory: str | Path) -> PretrainedModel:
    """Returns the model; raises CheckpointError if a parameter is not finite."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise CheckpointError(f"{directory}: {name}: expected finite numbers, got inf or NaN")
    return model


def with_trained_head(model: PretrainedModel, directory: str | Path, purpose: str) -> PretrainedModel:
    """Returns the model; raises CheckpointError if its head is randomly initialized. ``purpose`` describes the head."""
    if model.new_heads:
        raise CheckpointError(
            f"{directory}: expected a model with a trained head, got one without a head for {purpose}"
        )
    return model


def base_of(model: PretrainedModel) -> TextModel:
    """A text model without its head."""
    base = stack_of(model)
    assert isinstance(base, TextModel)
    return base


def stack_of(model: PretrainedModel) -> BaseModel:
    """A text or image model without its head: embeddings and layers."""
    base = model if model.base else getattr(model, model.names.prefix)
    assert isinstance(base, BaseModel)
    return base


def stated_length(config: Any, longest: int) -> int:
    """The maximum number of tokens with which ``fasttfm finetune`` has trained a model; ``longest`` if its
    configuration states none."""
    stated = config.extra.get(TASK_KEY)
    length = stated.get("max_length") if isinstance(stated, dict) else None
    return length if isinstance(length, int) and 3 <= length <= longest else longest


def max_length_of(config: Any, chosen: int | None, longest: int) -> int:
    """A session's maximum number of tokens: the ``chosen`` one, or by default the stated one."""
    length = stated_length(config, longest) if chosen is None else chosen
    if not isinstance(length, int) or not 3 <= length <= longest:
        expected = f"3 to the model's {longest} positions"
        raise ValueError(f"Session: max_length: expected {expected}, got {length!r}")
    return length


def device_of(name: str | torch.device | None, model: Any) -> torch.device:
    """The device of that name; by default the model's, or for a directory a GPU if there is one."""
    if name is None and isinstance(model, PretrainedModel):
        return next(model.parameters()).device
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if name is None else torch.device(name)
    if device.type != "cuda":
        return device
    if (device.index or 0) >= torch.cuda.device_count():
        got = f"{device}: torch sees {torch.cuda.device_count()} CUDA devices (fasttfm doctor says what to do)"
        raise ValueError(f"Session: device: expected a device that torch sees, got {got}")
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def check_model(model: Any, adapter: str | Path | None) -> None:
    """Checks these arguments of a session."""
    if not isinstance(model, (PretrainedModel, str, Path)):
        got = type(model).__name__
        raise TypeError(f"Session: model: expected a model of fasttfm.models, a directory or a hub id, got {got}")
    if isinstance(model, PretrainedModel) and adapter is not None:
        raise ValueError("Session: adapter: expected with a directory or hub id (models.merge_adapter)")
