"""A disk that is full at any write of a saved model or a file: what was there stays valid, and nothing else is left."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_fixtures import bert_directory, wordpiece

from fasttfm import _atomic_files, models
from fasttfm.data import Tokenizer
from fasttfm.data.task_files import TextExample
from fasttfm.tasks.distillation_runs import save_student
from fasttfm.tasks.finetuning import prepare, save
from fasttfm.tasks.prediction_files import opened
from fasttfm.tasks.vector_files import Row, write_vectors

__all__ = ["bert_directory", "wordpiece"]
pytestmark = pytest.mark.filterwarnings("ignore:.*randomly initialized, to be trained")


class Student:
    """What ``save_student`` reads of a recipe."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        self.student = models.BertModel(models.BertConfig(vocab_size=80, **sizes))
        self.projections = torch.nn.ModuleList([torch.nn.Linear(2 + seed, 2)])


def write_rows(folder: Path, version: int) -> None:
    with opened(folder / "labels.csv") as file:
        file.write(f"{version}\n")


@pytest.fixture
def savers(bert_directory: Path, wordpiece: Tokenizer) -> dict[str, Callable[[Path, int], Any]]:
    """Each writes the files of a version into a folder."""

    def classifier(folder: Path, version: int) -> None:
        torch.manual_seed(version)
        examples = [TextExample("peace", None, "a"), TextExample("war", None, f"b{version}")]
        save(*prepare("classify", bert_directory, examples, max_length=32 + version), folder)

    rows = [Row("a", np.zeros(3, np.float32)), Row("b", np.zeros(3, np.float32))]
    return {
        "finetune": classifier,
        "distill": lambda folder, version: save_student(Student(version), wordpiece, folder),  # type: ignore[arg-type]
        "embed": lambda folder, version: write_vectors(folder / "vectors.npy", rows[:version]),
        "predict": write_rows,
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def full_after(count: int, sync_file: Callable[[Path], None]) -> Callable[[Path], None]:
    """``sync_file`` on a disk that is full after some files."""
    seen: list[Path] = []

    def sync(path: Path) -> None:
        seen.append(path)
        if len(seen) > count:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        sync_file(path)

    return sync


@pytest.mark.parametrize("name", ["finetune", "distill", "embed", "predict"])
def test_a_full_disk_leaves_what_was_there(
    name: str, savers: dict[str, Callable[[Path, int], Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, new = savers[name], tmp_path / "new"
    new.mkdir()
    synced = _atomic_files.sync_file
    counted: list[Path] = []
    monkeypatch.setattr(_atomic_files, "sync_file", counted.append)
    saved(new, 2)
    old = tmp_path / "old"
    old.mkdir()
    saved(old, 1)
    before, writes = contents(old), len(counted) // 2
    assert before != contents(new)
    for full in range(writes):
        monkeypatch.setattr(_atomic_files, "sync_file", full_after(full, synced))
        with pytest.raises(OSError, match="No space left on device"):
            saved(old, 2)
        assert contents(old) == before
    monkeypatch.setattr(_atomic_files, "sync_file", synced)
    saved(old, 2)
    assert contents(old) == contents(new)
