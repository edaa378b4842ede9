"""``checkpoint_directory``: the directory with the files of a model, for all kinds of directories that have a model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fasttfm.models.checkpoint_files import CONFIG, LATEST, CheckpointError
from fasttfm.models.hub import Part, model_directory

MODULES = "modules.json"  # of sentence-transformers
PARTS = ("discriminator", "generator")  # the folders of ELECTRA's two models


def checkpoint_directory(
    name: str | Path, part: Part = Part.WEIGHTS, *, revision: str | None = None, token: str | bool | None = None
) -> Path:
    """The directory of the checkpoint in what ``model_directory`` finds: of a training run its newest checkpoint, of a
    sentence-transformers folder its transformer, otherwise the directory itself. Arguments are those of
    ``model_directory``."""
    path = model_directory(name, part, revision=revision, token=token)
    if (path / MODULES).is_file():
        modules = read_modules(path / MODULES)
        return path / module_path(modules[0], path / MODULES) if modules else path
    return path / LATEST if not (path / CONFIG).exists() and (path / LATEST).is_dir() else path


def read_modules(path: Path) -> list[dict[str, Any]]:
    """The list of modules in a sentence-transformers folder."""
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON: {error}") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{path}: expected a JSON list of objects, got {type(modules).__name__}")
    return modules


def module_path(module: dict[str, Any], listed: Path) -> str:
    """The path of a module. Raises CheckpointError if it leads out of the folder."""
    name = str(module.get("path", ""))
    if os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == os.pardir:
        raise CheckpointError(f"{listed}: path: expected a folder next to this file, got {name!r}")
    return name
