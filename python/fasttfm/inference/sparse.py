"""Sparse vectors over a vocabulary: SPLADE's and bge-m3's lexical weights, and the rows that sessions return."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fasttfm import ops
from fasttfm.inference.batches import SortedIds
from fasttfm.inference.results import Wait, starts_with_nan
from fasttfm.nn.lm_heads import MaskedLMHead

_BLOCK_BYTES = 2**26  # of a block of logits
_LEAST_COLUMNS = 64


class SparseVector(NamedTuple):
    """The elements of a vector that are not 0."""

    indices: np.ndarray  # int32 [n], ascending
    values: np.ndarray  # fp32 [n]


@dataclass(frozen=True, eq=False)
class SparseVectors:
    """Sparse vectors as CSR arrays: those of vector i are from ``indptr[i]`` to ``indptr[i + 1]``.

    ``vectors[i]`` is a ``SparseVector``, and ``vectors[a:b]`` are some of them.

    Args:
        indptr: int64 [vectors + 1].
        indices: int32 [n], ascending in each vector.
        values: fp32 [n].
        width: The number of elements of a vector, the size of the vocabulary.
    """

    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    width: int

    @classmethod
    def of(cls, vectors: Sequence[SparseVector], width: int) -> SparseVectors:
        counts = [0, *(len(vector.indices) for vector in vectors)]
        indices = [vector.indices for vector in vectors] or [np.empty(0, np.int32)]
        values = [vector.values for vector in vectors] or [np.empty(0, np.float32)]
        return cls(np.cumsum(counts, dtype=np.int64), np.concatenate(indices), np.concatenate(values), width)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.width

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __iter__(self) -> Iterator[SparseVector]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return SparseVectors.of([self[row] for row in range(*index.indices(len(self)))], self.width)
        if not -len(self) <= index < len(self):
            raise IndexError(f"SparseVectors: index: expected {-len(self)} to {len(self) - 1}, got {index}")
        part = slice(self.indptr[index % len(self)], self.indptr[index % len(self) + 1])
        return SparseVector(self.indices[part], self.values[part])

    def dense(self) -> np.ndarray:
        """fp32 [vectors, width]"""
        rows = np.zeros(self.shape, np.float32)
        rows[np.repeat(np.arange(len(self)), np.diff(self.indptr)), self.indices] = self.values
        return rows

    def scipy(self) -> Any:
        """As ``scipy.sparse.csr_array``."""
        from scipy.sparse import csr_array

        return csr_array((self.values, self.indices, self.indptr), shape=self.shape)


def word_blocks(words: int, tokens: int) -> Iterator[slice]:
    """Blocks of words whose logits, for this number of tokens with padding, take up to ``_BLOCK_BYTES``."""
    size = max(_LEAST_COLUMNS, _BLOCK_BYTES // (8 * max(1, tokens)))  # packed and padded
    return (slice(first, first + size) for first in range(0, words, size))


def largest_logits(head: MaskedLMHead, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """The largest logit of each word over each text's tokens, or 0 where none is above it: fp32 [texts, V].

    ``x`` are the packed states [T, C]. The logits of all tokens are never in memory: only those of a block of words.
    """
    rows, decoder = head.transform(x), head.decoder
    texts = len(cu_seqlens) - 1
    largest = torch.empty(texts, decoder.out_features, dtype=torch.float32, device=x.device)
    for words in word_blocks(decoder.out_features, texts * max_seqlen):
        bias = None if decoder.bias is None else decoder.bias[words]
        logits = nn.functional.linear(rows, decoder.weight[words], bias)
        largest[:, words] = ops.unpack(logits, cu_seqlens, max_seqlen).amax(1)  # padding is 0
    return largest.relu_()


class _Collected:
    """Results with a sparse vector for each sequence. The arguments are those of ``SequenceRows``."""

    def __init__(self, ids: SortedIds, count: int, width: int) -> None:
        nothing = SparseVector(np.empty(0, np.int32), np.empty(0, np.float32))
        self._ids, self._width = ids, width
        self._rows = [nothing] * count
        self.starts_with_nan = False

    def add(self, first: int, last: int, wait: Wait) -> None:
        """Waits for the batch of the sequences from ``first`` up to ``last``."""
        wait(lambda rows: self._put(first, last, rows))

    def _put(self, first: int, last: int, rows: np.ndarray) -> None:
        self.starts_with_nan |= starts_with_nan(rows)
        for number, index in enumerate(self._ids.order[first:last].tolist()):
            self._rows[index] = self._vector(first, number, rows)

    def _vector(self, first: int, number: int, rows: np.ndarray) -> SparseVector:
        raise NotImplementedError

    def rows(self) -> SparseVectors:
        return SparseVectors.of(self._rows, self._width)


class DenseRows(_Collected):
    """Rows of a batch are those of a dense matrix [sequences, width]."""

    def _vector(self, first: int, number: int, rows: np.ndarray) -> SparseVector:
        indices = np.flatnonzero(rows[number])
        return SparseVector(indices.astype(np.int32), rows[number][indices])


class TokenWeights(_Collected):
    """Rows of a batch are the weights of tokens [T, 1]: a word's is the largest one of its tokens.

    Args:
        ignored: Ids of special tokens, which have no weight.
    """

    def __init__(self, ids: SortedIds, count: int, width: int, ignored: Sequence[int]) -> None:
        super().__init__(ids, count, width)
        self._ignored = np.array(ignored, np.int64)

    def _vector(self, first: int, number: int, rows: np.ndarray) -> SparseVector:
        ends = self._ids.cu_seqlens
        begin, end = ends.item(first + number), ends.item(first + number + 1)
        start = ends.item(first)
        ids, weights = self._ids.ids[begin:end], rows[begin - start : end - start, 0]
        kept = (weights > 0) & ~np.isin(ids, self._ignored)
        ids, weights = ids[kept], weights[kept]
        order = np.lexsort((-weights, ids))  # the largest weight of each id first
        indices, places = np.unique(ids[order], return_index=True)
        return SparseVector(indices.astype(np.int32), weights[order][places])
