"""``Objective``: what a training sequence is made of; ``cut`` makes the sequences of some documents.

nsp      [CLS] A [SEP] B [SEP]   BERT's: B follows A (label 0), or is from another document (label 1, half of them)
sop      [CLS] A [SEP] B [SEP]   ALBERT's: A and B follow each other (label 0), or are swapped (label 1, half)
single   [CLS] A [SEP]           RoBERTa's: sentences of one document
electra  [CLS] A [SEP]           the same; the model itself replaces the predicted tokens
causal   A                       the GPTs': a document and its end token, in pieces
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["nsp", "sop", "single", "electra", "causal"]
# Tokens of a sequence that are not of the texts.
_ADDED = {"nsp": 3, "sop": 3, "single": 2, "electra": 2, "causal": 0}


@dataclass(frozen=True)
class Objective:
    """What is learnt from.

    Args:
        kind: ``"nsp"``, ``"sop"``, ``"single"``, ``"electra"`` or ``"causal"``.
        max_length: No sequence has more tokens, special ones included.
        short_probability: So many sequences aim at a random shorter length, so that a model meets those too; not with
            ``"causal"``.
    """

    kind: Kind
    max_length: int = 512
    short_probability: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in _ADDED:
            raise ValueError(f"Objective: kind: expected one of {', '.join(_ADDED)}, got {self.kind!r}")
        if self.max_length < _ADDED[self.kind] + 2:
            raise ValueError(f"Objective: max_length: expected {_ADDED[self.kind] + 2} or more, got {self.max_length}")
        if not 0 <= self.short_probability <= 1:
            raise ValueError(f"Objective: short_probability: expected one in [0, 1], got {self.short_probability}")

    @property
    def room(self) -> int:
        """How many tokens of the texts a sequence takes."""
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
    """Some documents, one after the other."""

    bounds: (
        np.ndarray
    )  # int64 [units + 1]: unit i is the tokens from [i] to [i + 1]; a sentence, or a part of a long one
    firsts: np.ndarray  # int64 [documents + 1]: document i is the units from [i] to [i + 1]
    ends: np.ndarray  # bool [documents]: whether the document ends here, or has been cut
    owners: np.ndarray  # int64 [documents], ascending: parts of the same document have the same number
    donors: int = 0  # so many documents at the end are there to take second sentences from only


class Sequences(NamedTuple):
    """Where the parts of n sequences lie; all int64 [n]."""

    first: np.ndarray  # token that A begins with
    first_length: np.ndarray
    second: np.ndarray  # and B
    second_length: np.ndarray  # 0 where there is none
    label: np.ndarray  # nsp, sop: the sentence label; causal: 1 where the end token follows
    length: np.ndarray  # with special tokens

    def take(self, chosen: np.ndarray) -> Sequences:
        return Sequences(*(column[chosen] for column in self))


def limit(objective: Objective) -> int:
    """A longer sentence is cut: two of a pair have to fit."""
    return objective.room // 2 if objective.pairs else objective.room


def cut(objective: Objective, documents: Documents, generator: np.random.Generator, *, end_token: bool) -> Sequences:
    """Every sequence of the documents, in their order.

    single, electra and causal use every token once. A pair needs two sentences: one that is left over at a document's
    end is not used, this time.
    """
    if objective.kind == "causal":
        return _cut_causal(objective, documents, end_token)
    rows = (
        _cut_pairs(objective, documents, generator) if objective.pairs else _cut_single(objective, documents, generator)
    )
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    first, first_length, second, second_length, label = table.T
    length = first_length + second_length + objective.added
    return Sequences(first, first_length, second, second_length, label, length)


def _cut_causal(objective: Objective, documents: Documents, end_token: bool) -> Sequences:
    starts = documents.bounds[documents.firsts]
    lengths, size = np.diff(starts), objective.max_length
    pieces = -(-lengths // size)
    first = np.repeat(starts[:-1], pieces) + size * counted(pieces)
    length = np.minimum(size, np.repeat(starts[1:], pieces) - first)
    last = np.zeros(len(first), dtype=bool)
    last[np.cumsum(pieces)[pieces > 0] - 1] = documents.ends[pieces > 0]
    ended = (last & (length < size) & end_token).astype(np.int64)
    nothing = np.zeros_like(first)
    return Sequences(first, length, nothing, nothing, ended, length + ended)


def _targets(objective: Objective, count: int, generator: np.random.Generator) -> list[int]:
    """The lengths that ``count`` sequences aim at."""
    targets = np.full(count, objective.room)
    short = generator.random(count, dtype=np.float32) < objective.short_probability
    targets[short] = generator.integers(2, objective.room + 1, int(short.sum()))
    result: list[int] = targets.tolist()
    return result


def _cut_single(
    objective: Objective, documents: Documents, generator: np.random.Generator
) -> list[tuple[int, int, int, int, int]]:
    bounds, firsts = documents.bounds.tolist(), documents.firsts.tolist()
    full = (np.searchsorted(documents.bounds, documents.bounds + objective.room, side="right") - 1).tolist()
    targets = _targets(objective, len(bounds), generator)
    rows: list[tuple[int, int, int, int, int]] = []
    for unit, end in itertools.pairwise(firsts):
        while unit < end:
            target = targets[len(rows)]
            last = full[unit] if target == objective.room else bisect_right(bounds, bounds[unit] + target) - 1
            last = min(max(unit + 1, last), end)
            rows.append((bounds[unit], bounds[last] - bounds[unit], 0, 0, 0))
            unit = last
    return rows


def _cut_pairs(
    objective: Objective, documents: Documents, generator: np.random.Generator
) -> list[tuple[int, int, int, int, int]]:
    bounds, firsts = documents.bounds.tolist(), documents.firsts.tolist()
    full = (np.searchsorted(documents.bounds, documents.bounds + objective.room, side="right") - 1).tolist()
    targets = _targets(objective, len(bounds), generator)
    # Where to divide, whether to change the order or the second part, which other sentence.
    draws = generator.random((len(bounds), 3)).tolist()
    rows: list[tuple[int, int, int, int, int]] = []
    for unit, end, *own in zip(firsts[: -1 - documents.donors], firsts[1:], *_own_units(documents), strict=False):
        while end - unit >= 2:
            target, (where, change, other) = targets[len(rows)], draws[len(rows)]
            last = full[unit] if target == objective.room else bisect_right(bounds, bounds[unit] + target) - 1
            last = min(max(unit + 2, last), end)
            middle = unit + 1 + int(where * (last - unit - 1))
            start, length = bounds[unit], bounds[middle] - bounds[unit]
            second, rest = bounds[middle], bounds[last] - bounds[middle]
            if change >= 0.5:
                rows.append((start, length, second, rest, 0))
                unit = last
            elif objective.kind == "sop":
                rows.append((second, rest, start, length, 1))
                unit = last
            else:  # the sentences that B would have had are used again
                room = max(target, bounds[last] - bounds[unit]) - length
                rows.append((start, length, *_from_elsewhere(bounds, firsts, own, other, room), 1))
                unit = middle
    return rows


def _own_units(documents: Documents) -> tuple[list[int], list[int]]:
    """For each document, the units of all its parts: from, to."""
    left = np.searchsorted(documents.owners, documents.owners, side="left")
    right = np.searchsorted(documents.owners, documents.owners, side="right")
    return documents.firsts[left].tolist(), documents.firsts[right].tolist()


def _from_elsewhere(bounds: list[int], firsts: list[int], own: list[int], draw: float, room: int) -> tuple[int, int]:
    """First token and length of sentences of another document that have room: any one, and those that follow it."""
    unit = int(draw * (len(bounds) - 1 - (own[1] - own[0])))
    if unit >= own[0]:
        unit += own[1] - own[0]
    end = firsts[bisect_right(firsts, unit)]
    last = min(bisect_right(bounds, bounds[unit] + room) - 1, end)
    return bounds[unit], bounds[last] - bounds[unit] if last > unit else room


def counted(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, and so on."""
    total = int(counts.sum())
    result: np.ndarray = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return result


def pack(lengths: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """Puts sequences into batches of at most ``budget`` tokens, nearly full ones.

    In their order, until the next does not fit; then the longest that still fit, until less than 1% is free.

    Returns: the sequences' numbers, batch by batch, and the batches' bounds among them.
    """
    sizes: list[int] = lengths.tolist()
    waiting: dict[int, list[int]] = {}
    for number in range(len(sizes) - 1, -1, -1):
        waiting.setdefault(sizes[number], []).append(number)
    available = sorted(waiting)
    taken = bytearray(len(sizes))
    order: list[int] = []
    bounds = [0]
    gap = budget

    for number, size in enumerate(sizes):
        if taken[number]:
            continue
        if size > gap:
            while gap > budget // 128:
                filler = _longest(waiting, available, taken, gap)
                if filler is None:
                    break
                order.append(filler)
                gap -= sizes[filler]
            bounds.append(len(order))
            gap = budget
        taken[number] = 1
        order.append(number)
        gap -= size
    if bounds[-1] < len(order):
        bounds.append(len(order))
    return np.array(order, dtype=np.int64), np.array(bounds, dtype=np.int64)


def _longest(waiting: dict[int, list[int]], available: list[int], taken: bytearray, gap: int) -> int | None:
    """Takes the first of the longest sequences that fit; None if there is none."""
    place = bisect_right(available, gap) - 1
    while place >= 0:
        numbers = waiting[available[place]]
        while numbers:
            number = numbers.pop()
            if not taken[number]:
                taken[number] = 1
                return number
        del available[place]
        place -= 1
    return None
