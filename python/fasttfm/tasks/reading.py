"""Reads a task's examples: from files of its format, a directory of them, or the sample that is shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from fasttfm.data.texts import data_error, shipped_task
from fasttfm.tasks.registry import TASKS

_PARTS = {"train": ("train",), "dev": ("dev", "valid")}
_HELD_OUT = 0.1


class Examples(NamedTuple):
    train: list[Any]
    dev: list[Any]
    source: str  # for messages


def read_examples(task: str, data: Path | None = None, dev: Path | None = None, *, seed: int = 0) -> Examples:
    """The training set and the dev set.

    Args:
        task: One of ``TASKS``.
        data: A file to learn from, or a directory with one whose name has "train" in it and one with "dev" or "valid".
            By default the sample that is shipped.
        dev: The file of the dev set. Without one, a tenth of the examples becomes the dev set.
        seed: Random seed of that choice.
    """
    if data is None:
        parts = shipped_task(task)
        source = "the shipped sample"
    elif data.is_dir():
        wanted = ("train",) if dev is not None else tuple(_PARTS)
        parts = {part: path for part in wanted if (path := _part(data, part)) is not None}
        if "train" not in parts:
            raise data_error(data, "a file whose name has 'train' in it", "none")
        source = str(data)
    else:
        parts, source = {"train": data}, str(data)
    if dev is not None:
        parts["dev"] = dev
    read = TASKS[task].read_file
    train = read(parts["train"])
    if "dev" in parts:
        return Examples(train, read(parts["dev"]), source)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = max(1, round(_HELD_OUT * len(train)))
    if held_out == len(train):
        raise data_error(parts["train"], "two examples or more, or a dev file", f"{len(train)}")
    return Examples([train[index] for index in order[held_out:]], [train[index] for index in order[:held_out]], source)


def _part(folder: Path, part: str) -> Path | None:
    names = _PARTS[part]
    found = [path for path in sorted(folder.iterdir()) if path.is_file() and any(name in path.name for name in names)]
    if len(found) > 1:
        raise data_error(folder, f"one file for {part}", ", ".join(path.name for path in found))
    return found[0] if found else None
