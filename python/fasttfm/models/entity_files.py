"""Files of entities and their vectors, in the format of OpenKE and of the knowledge embeddings released with ERNIE.

entity2id.txt    the number of entities, then a line ``name<TAB>number`` for each of them
entity2vec.vec   a line for each number: the entity's vector, its elements separated by tabs
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fasttfm._atomic_files import atomic_writes, write_text
from fasttfm.models.checkpoint_files import CheckpointError

ENTITY_IDS, ENTITY_VECTORS = "entity2id.txt", "entity2vec.vec"
RELATION_IDS, RELATION_VECTORS = "relation2id.txt", "relation2vec.vec"


def read_names(path: Path) -> list[str]:
    """The names of entities or relations, by their numbers."""
    lines = _lines(path)
    if not lines or not lines[0].strip().isdigit():
        got = repr(lines[0][:60]) if lines else "an empty file"
        raise _error(path, 1, "the number of lines that follow", got)
    count = int(lines[0])
    names: list[str | None] = [None] * count
    for number, line in enumerate(lines[1:], 2):
        name, tab, id = line.rpartition("\t")
        if not tab or not id.strip().isdigit() or not name:
            raise _error(path, number, "a name, a tab and a number", f"{line!r:.80}")
        if int(id) >= count or names[int(id)] is not None:
            expected = f"a number below {count} that no other line has"
            raise _error(path, number, expected, id.strip())
        names[int(id)] = name
    missing = [id for id, name in enumerate(names) if name is None]
    if missing:
        raise CheckpointError(f"{path}: expected {count} names, got none with the number {missing[0]}")
    return [name for name in names if name is not None]


def write_names(path: Path, names: Sequence[str]) -> None:
    write_text(path, names_text(names))


def names_text(names: Sequence[str]) -> str:
    return "".join([f"{len(names)}\n", *(f"{name}\t{id}\n" for id, name in enumerate(names))])


def read_vectors(path: Path) -> Tensor:
    """fp32 ``[entities, width]``"""
    lines = _lines(path)
    rows = np.empty((len(lines), len(lines[0].split()) if lines else 0), dtype=np.float32)
    for number, line in enumerate(lines):
        try:
            values = np.array(line.split(), dtype=np.float32)
        except ValueError:
            raise _error(path, number + 1, "numbers, separated by tabs", f"{line!r:.60}") from None
        if len(values) != rows.shape[1] or not np.isfinite(values).all():
            raise _error(path, number + 1, f"{rows.shape[1]} finite numbers, as in line 1", f"{len(values)}")
        rows[number] = values
    if not rows.size:
        raise CheckpointError(f"{path}: expected a vector a line, got none")
    return torch.from_numpy(rows)


def read_entities(directory: str | Path) -> tuple[list[str], Tensor]:
    """The entities' names and their vectors, of a directory that ``fasttfm transe`` has written, or a release has."""
    folder = Path(directory)
    names, vectors = read_names(folder / ENTITY_IDS), read_vectors(folder / ENTITY_VECTORS)
    if len(names) != len(vectors):
        expected = f"a vector for each of the {len(names)} entities of {ENTITY_IDS}"
        raise CheckpointError(f"{folder / ENTITY_VECTORS}: expected {expected}, got {len(vectors)}")
    return names, vectors


def write_embeddings(directory: Path, entities: Sequence[str], relations: Sequence[str], *vectors: Tensor) -> None:
    """The four files of a trained graph; ``vectors`` are the entities' and the relations'."""
    texts = {
        ENTITY_IDS: names_text(entities),
        RELATION_IDS: names_text(relations),
        ENTITY_VECTORS: _vectors_text(vectors[0]),
        RELATION_VECTORS: _vectors_text(vectors[1]),
    }
    with atomic_writes([directory / name for name in texts]) as partials:
        for name, text in texts.items():
            partials[directory / name].write_text(text, encoding="utf-8")


def _vectors_text(vectors: Tensor) -> str:
    return "".join("\t".join(f"{value:.6f}" for value in row) + "\n" for row in vectors.tolist())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"{path}: expected a readable file of UTF-8 text: {reason}") from None


def _error(path: Path, line: int, expected: str, got: str) -> CheckpointError:
    return CheckpointError(f"{path}, line {line}: expected {expected}, got {got}")
