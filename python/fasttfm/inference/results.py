"""Results of the batches of one call, in the order in which the call gave its sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from fasttfm.inference.batches import SortedIds


class Wait(Protocol):
    """Waits for a batch, once. Returns its rows; if ``read`` is given, what that returns for them. Rows that ``read``
    receives may be overwritten afterwards, and need no copy before."""

    def __call__(self, read: Callable[[np.ndarray], Any] | None = None) -> Any: ...


class MaybeNan(Protocol):
    starts_with_nan: bool  # whether the first value of a batch is NaN


class SequenceRows:
    """Results with one row for each sequence: an array fp32 [sequences, ...].

    Args:
        count: How many sequences were given, including those without tokens, whose rows are 0.
        empty_shape: Returns the shape of a row; called only if no sequence has tokens.
    """

    def __init__(self, ids: SortedIds, count: int, empty_shape: Callable[[], tuple[int, ...]]) -> None:
        self._order, self._count, self._empty_shape = ids.order, count, empty_shape
        self._rows: np.ndarray | None = None
        self.starts_with_nan = False

    def add(self, first: int, last: int, wait: Wait) -> None:
        """Waits for the batch of the sequences from ``first`` up to ``last``."""
        wait(lambda rows: self._put(self._order[first:last], rows))

    def _put(self, indices: np.ndarray, rows: np.ndarray) -> None:
        if self._rows is None:
            make = np.empty if len(self._order) == self._count else np.zeros
            self._rows = make((self._count, *rows.shape[1:]), np.float32)
        self._rows[indices] = rows
        self.starts_with_nan |= starts_with_nan(rows)

    def rows(self) -> np.ndarray:
        if self._rows is None:
            return np.zeros((self._count, *self._empty_shape()), np.float32)
        return self._rows


class TokenRows:
    """Results with one row for each token: a list of arrays fp32 [tokens, ...]. The arguments are ``SequenceRows``'."""

    def __init__(self, ids: SortedIds, count: int, empty_shape: Callable[[], tuple[int, ...]]) -> None:
        self._ids, self._empty_shape = ids, empty_shape
        self._rows: list[np.ndarray | None] = [None] * count
        self.starts_with_nan = False

    def add(self, first: int, last: int, wait: Wait) -> None:
        rows = wait()
        self.starts_with_nan |= starts_with_nan(rows)
        ends = (self._ids.cu_seqlens[first : last + 1] - self._ids.cu_seqlens[first]).tolist()
        for number, index in enumerate(self._ids.order[first:last].tolist()):
            self._rows[index] = rows[ends[number] : ends[number + 1]]

    def rows(self) -> list[np.ndarray]:
        if len(self._ids.order) < len(self._rows):
            nothing = np.zeros(self._empty_shape(), np.float32)
            return [nothing if rows is None else rows for rows in self._rows]
        return self._rows  # type: ignore[return-value]


def starts_with_nan(rows: np.ndarray) -> bool:
    """Whether the first value of a batch is NaN."""
    return rows.size > 0 and math.isnan(rows.item(0))
