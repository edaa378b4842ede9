"""Files of sparse vectors, and search over them by inverted lists."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fasttfm._atomic_files import atomic_write
from fasttfm.data.lines import data_error
from fasttfm.inference.sparse import SparseVector, SparseVectors
from fasttfm.tasks.search import Match

SUFFIXES = (".npz", ".jsonl")


def write_sparse(path: Path, rows: Iterable[tuple[str, SparseVector]], width: int) -> tuple[int, int]:
    """Writes texts' vectors; the file appears when it is complete. Returns the numbers of vectors and of weights.

    - ``.npz``: CSR arrays with the names of ``scipy.sparse.save_npz``. All vectors are in memory before.
    - ``.jsonl``: one object per line with ``text``, ``indices`` and ``values``.
    """
    with atomic_write(path) as partial:
        if path.suffix == ".npz":
            vectors = SparseVectors.of([vector for _, vector in rows], width)
            arrays: dict[str, Any] = {"data": vectors.values, "indices": vectors.indices, "indptr": vectors.indptr}
            with partial.open("wb") as file:
                np.savez(file, format=np.array(b"csr"), shape=np.array(vectors.shape), **arrays)
            return len(vectors), len(vectors.values)
        count = weights = 0
        with partial.open("w", encoding="utf-8") as lines:
            for text, vector in rows:
                count, weights = count + 1, weights + len(vector.indices)
                values = [float(str(value)) for value in vector.values]
                row = {"text": text, "indices": vector.indices.tolist(), "values": values}
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        return count, weights


def is_sparse(path: str | Path) -> bool:
    """Whether a file has CSR arrays."""
    if Path(path).suffix != ".npz" or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return "indptr.npy" in archive.namelist()


def read_sparse(path: str | Path) -> SparseVectors:
    """The vectors of a ``.npz`` of ``write_sparse`` or ``scipy.sparse.save_npz``."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = ("indptr", "indices", "data", "shape")
            indptr, indices, values, shape = (arrays[name] for name in names)
            kind = str(arrays["format"].item())
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise data_error(path, "CSR arrays", str(error)) from None
    if kind not in ("csr", "b'csr'"):
        raise data_error(path, "CSR arrays", f"the format {kind}")
    width = int(shape[1]) if shape.shape == (2,) else -1
    known = indptr.ndim == 1 and len(indptr) == shape[0] + 1 and indptr[0] == 0 and (np.diff(indptr) >= 0).all()
    known = known and len(indices) == len(values) == indptr[-1]
    if not known or (len(indices) and not 0 <= indices.min() <= indices.max() < width):
        raise data_error(path, "CSR arrays that fit together", f"shape {shape.tolist()}, {len(values)} weights")
    return SparseVectors(indptr.astype(np.int64), indices.astype(np.int32), values.astype(np.float32), width)


class InvertedLists:
    """For each word, the vectors that have it, and their weights: a query reads only the lists of its words."""

    def __init__(self, vectors: SparseVectors) -> None:
        order = np.argsort(vectors.indices, kind="stable")
        rows = np.repeat(np.arange(len(vectors)), np.diff(vectors.indptr))
        self._rows, self._weights = rows[order], vectors.values[order]
        self._starts = np.zeros(vectors.width + 1, np.int64)
        np.cumsum(np.bincount(vectors.indices, minlength=vectors.width), out=self._starts[1:])
        self._count, self.width = len(vectors), vectors.width

    def scores(self, query: SparseVector) -> np.ndarray:
        """fp32 [vectors]: the dot products."""
        scores = np.zeros(self._count, np.float32)
        for word, weight in zip(query.indices.tolist(), query.values.tolist(), strict=True):
            part = slice(self._starts[word], self._starts[word + 1])
            scores[self._rows[part]] += weight * self._weights[part]  # a vector has a word once
        return scores

    def search(self, queries: SparseVectors, count: int = 10) -> list[list[Match]]:
        """The ``count`` vectors with the largest dot products with each query, the largest first; ties are ordered as
        in the file. Vectors that share no word with the query are not found."""
        if queries.width != self.width:
            raise ValueError(f"search: queries: expected vectors of the file's width {self.width}, got {queries.width}")
        matches = []
        for query in queries:
            scores = self.scores(query)
            best = np.argpartition(-scores, min(count, self._count - 1))[:count] if count < self._count else None
            rows = np.arange(self._count) if best is None else np.flatnonzero(scores >= scores[best].min())
            rows = rows[scores[rows] > 0]
            order = rows[np.lexsort((rows, -scores[rows]))][:count]
            matches.append([Match(int(row), float(scores[row]), None) for row in order])
        return matches
