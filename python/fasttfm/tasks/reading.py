"""Reads the examples of a task from files, from a directory, or from the shipped sample."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fasttfm.data.images import is_image_folder
from fasttfm.data.lines import data_error
from fasttfm.data.task_files import BY_NAME, Columns, describe_columns, read_texts
from fasttfm.data.texts import shipped_task
from fasttfm.tasks.images import ImageTask
from fasttfm.tasks.labels import PairTask
from fasttfm.tasks.registry import TASKS

# The words in file names that identify the parts of a data set; CoNLL-2003's dev set is "testa".
_PARTS = {"train": ("train", "training"), "dev": ("dev", "valid", "validation", "val", "testa"), "test": ("test",)}
_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.)")
_SUFFIXES = (
    ".jsonl",
    ".parquet",
    ".tsv",
    ".csv",
    ".json",
    ".txt",
    ".npz",
)  # if a file exists in several formats, the first of these is read
_HELD_OUT = 0.1


class Examples(NamedTuple):
    train: list[Any]
    dev: list[Any]
    source: str  # for messages


def read_examples(
    task: str,
    data: Path | None = None,
    dev: Path | None = None,
    *,
    seed: int = 0,
    columns: Columns = BY_NAME,
    language: str | None = None,
) -> Examples:
    """The training set and the dev set.

    Args:
        task: One of ``TASKS``.
        data: A file of training examples, or a directory with one whose name has "train" in it and one with "dev",
            "val" or "validation". By default the shipped sample.
        dev: The file of the dev set. Without one, a random tenth of the examples becomes the dev set.
        seed: Random seed of that choice.
        columns: The columns of the files, if their names do not identify them.
        language: Without ``data``, the language of the shipped sample: ``"english"`` (the default) or ``"korean"``.
    """
    if data is None:
        parts = {part: [path] for part, path in shipped_task(task, language or "english").items()}
        source = "the shipped sample" if language is None else f"the shipped sample in {language.title()}"
    elif language is not None:
        raise ValueError("language: expected without data: it selects the sample that ships with the package")
    else:
        parts = {"train": [data]}
        if data.is_dir() and not _is_split(data) and not (task == ImageTask.name and is_image_folder(data)):
            part_names = ("train",) if dev is not None else ("train", "dev")
            parts = {part: files for part in part_names if (files := part_files(data, part))}
            if "train" not in parts:
                raise data_error(data, "a file whose name has 'train' in it", "none")
        source = str(data)
        if TASKS[task].read_file is read_texts:
            source = f"{data}, {describe_columns(parts['train'][0], columns)}"
    if dev is not None:
        parts["dev"] = [dev]
    train = read_files(task, parts["train"], columns)
    if "dev" in parts:
        return Examples(train, read_files(task, parts["dev"], columns), source)
    order = torch.randperm(len(train), generator=torch.Generator("cpu").manual_seed(seed), device="cpu").tolist()
    held_out = max(1, round(_HELD_OUT * len(train)))
    if held_out == len(train):
        raise data_error(parts["train"][0], "two examples or more, or a dev file", f"{len(train)}")
    return Examples([train[index] for index in order[held_out:]], [train[index] for index in order[:held_out]], source)


def read_files(task: str, files: list[Path], columns: Columns = BY_NAME) -> list[Any]:
    """The examples of all files."""
    read: Any = TASKS[task].read_file
    if columns != BY_NAME and "columns" not in inspect.signature(read).parameters:
        able = [name for name, task in TASKS.items() if "columns" in inspect.signature(task.read_file).parameters]
        raise ValueError(f"columns: expected with the tasks {', '.join(able)}, got them with {task}")
    examples_of_files: list[Any] = []
    for path in files:
        examples = read(path) if columns == BY_NAME else read(path, columns)
        if task == PairTask.name and examples[0].second is None:
            raise data_error(path, "two texts in each example (--pair-column names the second)", "one")
        examples_of_files += examples
    return examples_of_files


def part_files(folder: Path, part: str) -> list[Path]:
    """The file of a part of a data set in a folder, or its shards; empty if there is none. If it exists in several
    formats, the first of ``_SUFFIXES``; of MNLI's dev and test sets, the matched one."""
    names = _PARTS[part]
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        stem = _stem(path)
        if any(word in names for word in re.split(r"[^a-z]+", stem)) and (path.is_file() or path.is_dir()):
            files.setdefault(_SHARD.sub("", path.name), []).append(path)
    if not files and (folder / "data").is_dir():  # the layout of data sets on the hub
        return part_files(folder / "data", part)
    for chosen in (
        [key for key in files if _stem(Path(key)) in names],
        [key for key in files if "matched" in re.split(r"[^a-z]+", key)],
        list(files),
    ):
        best = [key for suffix in _SUFFIXES for key in chosen if key.removesuffix(".gz").endswith(suffix)]
        same = len({_stem(Path(key)) for key in chosen}) == 1
        if len(chosen) == 1 or (same and best):
            return files[best[0] if best else chosen[0]]
    if files:
        raise data_error(folder, f"one file for {part}", ", ".join(files))
    return []


def _stem(path: Path) -> str:
    """The name without its suffixes, in lower case."""
    name = path.name.removesuffix(".gz")
    return (name.rpartition(".")[0] if name.endswith(_SUFFIXES) else name).lower()


def _is_split(folder: Path) -> bool:
    """Whether a folder is itself one part: a data set that ``datasets`` has saved, or RACE's files."""
    return (folder / "state.json").is_file() or folder.name in ("middle", "high")
