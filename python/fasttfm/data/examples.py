"""``SequenceFormat``: the format of training sequences; ``cut`` makes sequences of documents.

nsp      [CLS] A [SEP] B [SEP]   BERT: B follows A (label 0), or is from another document (label 1, half of them)
sop      [CLS] A [SEP] B [SEP]   ALBERT: B follows A (label 0), or they are swapped (label 1, half of them)
single   [CLS] A [SEP]           RoBERTa: sentences of one document
electra  [CLS] A [SEP]           the same; the model replaces the predicted tokens
causal   A                       GPT: a document and its end token, in pieces
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

Kind = Literal["nsp", "sop", "single", "electra", "causal"]
# The number of special tokens in a sequence.
_ADDED = {"nsp": 3, "sop": 3, "single": 2, "electra": 2, "causal": 0}


@dataclass(frozen=True)
class SequenceFormat:
    """The format of training sequences.

    Args:
        kind: ``"nsp"``, ``"sop"``, ``"single"``, ``"electra"`` or ``"causal"``.
        max_length: The maximum number of tokens in a sequence, special tokens included.
        short_probability: The fraction of sequences that get a random shorter length, so that a model also learns from
            short sequences; not used with ``"causal"``.
    """

    kind: Kind
    max_length: int = 512
    short_probability: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in _ADDED:
            raise ValueError(f"SequenceFormat: kind: expected one of {', '.join(_ADDED)}, got {self.kind!r}")
        if self.max_length < _ADDED[self.kind] + 2:
            raise ValueError(
                f"SequenceFormat: max_length: expected {_ADDED[self.kind] + 2} or more, got {self.max_length}"
            )
        if not 0 <= self.short_probability <= 1:
            raise ValueError(f"SequenceFormat: short_probability: expected one in [0, 1], got {self.short_probability}")

    @property
    def room(self) -> int:
        """The maximum number of text tokens in a sequence."""
        return self.max_length - _ADDED[self.kind]

    @property
    def added(self) -> int:
        return _ADDED[self.kind]

    @property
    def pairs(self) -> bool:
        return self.kind in ("nsp", "sop")

    @property
    def masked(self) -> bool:
        return self.kind != "causal"


class Documents(NamedTuple):
    """Documents, or parts of long documents, concatenated. A unit is a sentence, or a piece of a long one."""

    bounds: np.ndarray  # int64 [units + 1]: unit i has the tokens from bounds[i] to bounds[i + 1]
    firsts: np.ndarray  # int64 [documents + 1]: document i has the units from firsts[i] to firsts[i + 1]
    ends: np.ndarray  # bool [documents]: whether the part includes the end of its document
    owners: np.ndarray  # int64 [documents], ascending: parts of the same document have the same number
    donors: int = 0  # the number of documents at the end that only provide second sentences


class Sequences(NamedTuple):
    """The positions of the parts of n sequences; all int64 [n]."""

    first: np.ndarray  # the first token of A
    first_length: np.ndarray
    second: np.ndarray  # the first token of B
    second_length: np.ndarray  # 0 without B
    label: np.ndarray  # nsp, sop: the sentence label; causal: 1 if the end token follows
    length: np.ndarray  # with special tokens

    def take(self, chosen: np.ndarray) -> Sequences:
        return Sequences(*(column[chosen] for column in self))


def limit(sequence_format: SequenceFormat) -> int:
    """The maximum number of tokens of a unit; longer sentences are split, so that the two of a pair fit."""
    return sequence_format.room // 2 if sequence_format.pairs else sequence_format.room


def cut(
    sequence_format: SequenceFormat, documents: Documents, generator: np.random.Generator, *, end_token: bool
) -> Sequences:
    """All sequences of the documents, in an arbitrary order.

    single, electra and causal use every token once. A pair needs two sentences, so a single sentence that is left over
    at the end of a document is not used.
    """
    if sequence_format.kind == "causal":
        return _cut_causal(sequence_format, documents, end_token)
    function = _cut_pairs if sequence_format.pairs else _cut_single
    columns = function(sequence_format, documents, generator)
    return Sequences(*columns, columns[1] + columns[3] + sequence_format.added)


def _cut_causal(sequence_format: SequenceFormat, documents: Documents, end_token: bool) -> Sequences:
    starts = documents.bounds[documents.firsts]
    size = sequence_format.max_length
    pieces = -(-np.diff(starts) // size)
    first = spread(starts[:-1], pieces, step=size)
    length = np.minimum(size, np.repeat(starts[1:], pieces) - first)
    last = np.zeros(len(first), dtype=bool)
    last[np.cumsum(pieces) - 1] = documents.ends
    ended = (last & (length < size) & end_token).astype(np.int64)
    nothing = np.zeros_like(first)
    return Sequences(first, length, nothing, nothing, ended, length + ended)


Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # Sequences without length


def _cut_single(sequence_format: SequenceFormat, documents: Documents, generator: np.random.Generator) -> Columns:
    """Cuts all documents at the same time: each step makes the next sequence of every document with units left."""
    bounds = documents.bounds
    unit, end = documents.firsts[:-1], documents.firsts[1:]
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    while len(unit):
        last, _ = _last_units(sequence_format, bounds, unit, end, generator)
        rows.append((bounds[unit], bounds[last] - bounds[unit]))
        left = last < end
        unit, end = last[left], end[left]
    first, length = _joined(rows, 2)
    nothing = np.zeros_like(first)
    return first, length, nothing, nothing, nothing


def _cut_pairs(sequence_format: SequenceFormat, documents: Documents, generator: np.random.Generator) -> Columns:
    """As ``_cut_single``. If B comes from another document, the sentences that would have been B are used again."""
    bounds, firsts = documents.bounds, documents.firsts
    ends_by_unit = np.repeat(firsts[1:], np.diff(firsts))
    count = len(firsts) - 1 - documents.donors
    state = np.stack([firsts[:-1], firsts[1:], *_own_units(documents)])[:, :count]
    rows: list[Columns] = []
    while True:
        unit, end, own, own_end = state = state[:, state[1] - state[0] >= 2]
        if not len(unit):
            break
        last, target = _last_units(sequence_format, bounds, unit, end, generator, least=2)
        where, change, other = generator.random((3, len(unit)))
        middle = unit + 1 + (where * (last - unit - 1)).astype(np.int64)
        changed = change < 0.5
        first, second, stop = bounds[unit], bounds[middle], bounds[last]
        if sequence_format.kind == "sop":
            a, b = np.where(changed, (second, first), (first, second))
            a_length, b_length = np.where(changed, (stop - second, second - first), (second - first, stop - second))
            state[0] = last
        else:
            any_unit = (other * (len(bounds) - 1 - (own_end - own))).astype(np.int64)
            any_unit += np.where(any_unit >= own, own_end - own, 0)  # skips the units of the same document
            room = np.maximum(target, stop - first) - (second - first)
            fits = np.searchsorted(bounds, bounds[any_unit] + room, side="right") - 1
            fits = np.minimum(fits, ends_by_unit[np.minimum(any_unit, len(ends_by_unit) - 1)])
            elsewhere = np.where(fits > any_unit, bounds[fits] - bounds[any_unit], room)
            a, a_length = first, second - first
            b, b_length = np.where(changed, bounds[any_unit], second), np.where(changed, elsewhere, stop - second)
            state[0] = np.where(changed, middle, last)
        rows.append((a, a_length, b, b_length, changed.astype(np.int64)))
    columns = _joined(rows, 5)
    return columns[0], columns[1], columns[2], columns[3], columns[4]


def _last_units(
    sequence_format: SequenceFormat,
    bounds: np.ndarray,
    unit: np.ndarray,
    end: np.ndarray,
    generator: np.random.Generator,
    least: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """The ends, in units, of the sequences that start with ``unit``, and their target lengths."""
    short, where = generator.random((2, len(unit)))
    shorter = 2 + (where * (sequence_format.room - 1)).astype(np.int64)
    target = np.where(short < sequence_format.short_probability, shorter, sequence_format.room)
    last = np.searchsorted(bounds, bounds[unit] + target, side="right") - 1
    return np.minimum(np.maximum(last, unit + least), end), target


def _own_units(documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    """The range of units of all parts of each document."""
    left = np.searchsorted(documents.owners, documents.owners, side="left")
    right = np.searchsorted(documents.owners, documents.owners, side="right")
    return documents.firsts[left], documents.firsts[right]


def _joined(rows: list[Any], columns: int) -> list[np.ndarray]:
    if not rows:
        return [np.zeros(0, np.int64)] * columns
    return [np.concatenate(column) for column in zip(*rows, strict=True)]


def spread(starts: np.ndarray, lengths: np.ndarray, *, step: int = 1) -> np.ndarray:
    """Concatenates the ranges starts[i], starts[i] + step, ... of lengths[i] numbers."""
    before = np.cumsum(lengths) - lengths
    numbers = np.arange(int(lengths.sum()))
    result: np.ndarray = np.repeat(starts - step * before, lengths) + (numbers if step == 1 else step * numbers)
    return result


def pack(lengths: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Divides sequences into nearly full batches of at most ``budget`` tokens.

    Some short sequences are set aside as fillers. The others fill batches in their order until the next one does not
    fit; the gap is then filled with the longest fillers that fit, until it is below 1%.

    Returns:
        The numbers of the sequences, batch by batch, and the batches' bounds in them.
    """
    by_length = np.argsort(lengths, kind="stable")
    kept = min(len(lengths) // 4, 4 * (int(lengths.sum()) // budget))
    fillers: list[int] = by_length[:kept].tolist()  # the shortest first
    sizes: list[int] = lengths[fillers].tolist()
    order: list[int] = []
    bounds = [0]
    waiting = np.sort(by_length[kept:])
    while len(waiting):
        numbers: list[int] = waiting.tolist()
        total: list[int] = np.append(0, np.cumsum(lengths[waiting])).tolist()
        start = 0
        while start < len(numbers):
            stop = bisect_right(total, total[start] + budget) - 1
            order += numbers[start:stop]
            gap = budget - (total[stop] - total[start])
            while gap > budget // 128 and (index := bisect_right(sizes, gap) - 1) >= 0:
                gap -= sizes.pop(index)
                order.append(fillers.pop(index))
            bounds.append(len(order))
            start = stop
        waiting, fillers, sizes = np.sort(np.array(fillers, dtype=np.int64)), [], []  # unused fillers
    return np.array(order, dtype=np.int64), np.array(bounds, dtype=np.int64)
