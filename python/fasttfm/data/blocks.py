"""``Blocks``: which documents are worked on together: an epoch is a sequence of blocks, each some millions of tokens.

Documents come in a random order, another in each epoch; sequences are shuffled within a block. So no plan of a whole
corpus is ever made, and every block is a function of (corpus, seed, epoch, its number) alone.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fasttfm.data.examples import Documents, counted
from fasttfm.data.shards import TokenShards

# What a random number is for; a part of its key.
ORDER, CUT, MASK = range(3)


def generator(seed: int, purpose: int, *place: int) -> np.random.Generator:
    """Random numbers that depend on nothing but the arguments (up to three numbers for a place)."""
    counter = [0, *place, *[0] * (3 - len(place))]
    return np.random.Generator(np.random.Philox(key=[seed, purpose], counter=counter))


class Block(NamedTuple):
    tokens: np.ndarray  # uint16 or uint32
    documents: Documents


class Blocks:
    """The blocks of a corpus.

    Args:
        shards: The corpus.
        size: Tokens of a block, about.
        unit: Sentences with more tokens are cut.
        seed: Of the order of documents.
    """

    def __init__(self, shards: TokenShards, size: int, unit: int, seed: int) -> None:
        self.shards, self.unit, self.seed = shards, unit, seed
        self.count = max(1, round(shards.tokens / size))
        self.size = -(-shards.tokens // self.count)
        self.parts = _parts(shards, max(unit, self.size // 8))
        self._order = lru_cache(maxsize=2)(self._order_of)

    def load(self, epoch: int, number: int, *, two_documents: bool) -> Block:
        """A block's tokens and documents.

        Args:
            epoch: From 0.
            number: From 0 to ``count - 1``.
            two_documents: A block of one document gets a part of another, to take sentences from.
        """
        order, bounds = self._order(epoch)
        chosen = np.sort(order[bounds[number] : bounds[number + 1]])
        donors = 0
        owners = self.parts[chosen, 0]
        if two_documents and len(owners) and owners[0] == owners[-1]:
            others = order[self.parts[order, 0] != owners[0]]
            if len(others):
                chosen, donors = np.append(chosen, others[number % len(others)]), 1
        rows = self.parts[chosen]
        tokens, ends = [], []
        for shard, sentence, sentences, start, length in rows[:, 1:6].tolist():
            files = self.shards.files[shard]
            tokens.append(files["tokens"][start : start + length])
            ends.append(files["sentences"][sentence + 1 : sentence + sentences + 1])
        return Block(np.concatenate(tokens), self._documents(rows, np.concatenate(ends), donors))

    def _documents(self, rows: np.ndarray, ends: np.ndarray, donors: int) -> Documents:
        sentences, starts, lengths = rows[:, 3], rows[:, 4], rows[:, 5]
        local = np.cumsum(lengths) - lengths
        # Where sentences end, in the block; a cut document's last one ends with it.
        ends = np.minimum(ends - np.repeat(starts - local, sentences), np.repeat(local + lengths, sentences))
        sizes = np.diff(ends, prepend=0)
        pieces = -(-sizes // self.unit)
        units = np.repeat(ends - sizes, pieces) + self.unit * counted(pieces)
        before = np.append(0, np.cumsum(pieces))
        owners = rows[:, 0].copy()
        if donors:
            owners[-1] = np.iinfo(np.int64).max  # behind the others, whichever its number
        return Documents(
            bounds=np.append(units, int(lengths.sum())),
            firsts=before[np.append(0, np.cumsum(sentences))],
            ends=rows[:, 6].astype(bool),
            owners=owners,
            donors=donors,
        )

    def _order_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The parts' order in an epoch, and the blocks' bounds in it."""
        order = generator(self.seed, ORDER, epoch).permutation(len(self.parts))
        starts = np.cumsum(self.parts[order, 5]) - self.parts[order, 5]
        bounds = np.searchsorted(starts, self.size * np.arange(self.count + 1))
        bounds[-1] = len(order)
        return order, bounds


def _parts(shards: TokenShards, most: int) -> np.ndarray:
    """int64 [parts, 7]: document, shard, first sentence, sentences, first token, tokens, whether the document ends.

    Documents with more than ``most`` tokens are cut, behind a sentence where one ends near.
    """
    index = shards.index
    numbers = np.arange(len(index))
    whole = np.concatenate([numbers[:, None], index, np.ones((len(index), 1), np.int64)], axis=1)
    rows = [whole[index[:, 4] <= most]]
    for number in numbers[index[:, 4] > most].tolist():
        shard, sentence, sentences, start, length = index[number].tolist()
        bounds = np.asarray(shards.files[shard]["sentences"][sentence : sentence + sentences + 1])
        cuts = [start]
        while cuts[-1] < start + length:
            near = int(bounds[np.searchsorted(bounds, cuts[-1] + most, side="right") - 1])
            cuts.append(near if near > cuts[-1] else cuts[-1] + most)
        for low, high in itertools.pairwise(cuts):
            first = int(np.searchsorted(bounds, low, side="right")) - 1
            last = int(np.searchsorted(bounds, high, side="left"))
            part = [number, shard, sentence + first, last - first, low, high - low, int(high == start + length)]
            rows.append(np.array([part]))
    parts = np.concatenate(rows)
    result: np.ndarray = parts[np.lexsort((parts[:, 4], parts[:, 0]))]
    return result
