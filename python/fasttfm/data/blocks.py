"""``Blocks``: an epoch is a sequence of blocks of documents, each of some millions of tokens.

Documents are in a random order, another one in each epoch; sequences are shuffled within a block. So the whole corpus
is never planned at once, and a block is a function only of corpus, seed, epoch and its index.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from fasttfm.data.examples import Documents, SequenceFormat, limit, spread

# The purpose of random numbers, a part of their Philox key.
ORDER, CUT, MASK = range(3)


def generator(seed: int, purpose: int, *counters: int) -> np.random.Generator:
    """A generator that depends only on the arguments; ``counters`` has up to three numbers."""
    counter = np.array([0, *counters, *[0] * (3 - len(counters))], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([seed, purpose], dtype=np.uint64), counter=counter))


class TokenSource(Protocol):
    """Documents as token ids: ``TokenShards``, or a window of a stream."""

    @property
    def index(self) -> np.ndarray:
        """int64 [documents, 5]: shard, first sentence, sentences, first token, tokens."""

    @property
    def files(self) -> tuple[dict[str, np.ndarray], ...]:
        """Each shard's tokens, sentences and documents."""

    @property
    def tokens(self) -> int:
        """The number of tokens of all documents."""


class Block(NamedTuple):
    tokens: np.ndarray  # uint16 or uint32
    documents: Documents


class Blocks:
    """The blocks of a corpus.

    Args:
        shards: The corpus.
        sequence_format: The format of its sequences.
        size: The approximate number of tokens in a block.
        seed: Random seed of the order of documents.
    """

    def __init__(self, shards: TokenSource, sequence_format: SequenceFormat, size: int, seed: int) -> None:
        self.shards, self.unit, self.seed = shards, limit(sequence_format), seed
        self.two_documents = sequence_format.kind == "nsp"
        self.count = max(1, round(shards.tokens / size))
        self.size = -(-shards.tokens // self.count)
        # The documents of a block are cut in an interleaved order; otherwise only long documents would be left at the
        # end.
        self.parts = _parts(shards, 64 * sequence_format.max_length, at_sentences=sequence_format.kind != "causal")
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def load(self, epoch: int, number: int) -> Block:
        """A block's tokens and documents. If a block for nsp has only one document, a part of another one is added,
        from which random second sentences are taken."""
        order, bounds = self._order(epoch)
        chosen = np.sort(order[bounds[number] : bounds[number + 1]])
        donors = 0
        owners = self.parts[chosen, 0]
        if self.two_documents and len(owners) and owners[0] == owners[-1]:
            others = order[self.parts[order, 0] != owners[0]]
            if len(others):
                chosen, donors = np.append(chosen, others[number % len(others)]), 1
        rows = self.parts[chosen]
        tokens, ends = [self.shards.files[0]["tokens"][:0]], [np.zeros(0, np.int64)]
        for shard, sentence, sentences, start, length in rows[:, 1:6].tolist():
            files = self.shards.files[shard]
            tokens.append(files["tokens"][start : start + length])
            ends.append(files["sentences"][sentence + 1 : sentence + sentences + 1])
        return Block(np.concatenate(tokens), self._documents(rows, np.concatenate(ends), donors))

    def _documents(self, rows: np.ndarray, ends: np.ndarray, donors: int) -> Documents:
        sentences, starts, lengths = rows[:, 3], rows[:, 4], rows[:, 5]
        local = np.cumsum(lengths) - lengths
        # The ends of sentences in the block; the last sentence of a part ends with the part.
        ends = np.minimum(ends - np.repeat(starts - local, sentences), np.repeat(local + lengths, sentences))
        sizes = np.diff(ends, prepend=0)
        pieces = -(-sizes // self.unit)
        units = spread(ends - sizes, pieces, step=self.unit)
        before = np.append(0, np.cumsum(pieces))
        owners = rows[:, 0].copy()
        if donors:
            owners[-1] = np.iinfo(np.int64).max  # owners are ascending
        return Documents(
            bounds=np.append(units, int(lengths.sum())),
            firsts=before[np.append(0, np.cumsum(sentences))],
            ends=rows[:, 6].astype(bool),
            owners=owners,
            donors=donors,
        )

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The parts' order in an epoch, and the blocks' bounds in it."""
        if epoch in self._orders:
            return self._orders[epoch]
        order = generator(self.seed, ORDER, epoch).permutation(len(self.parts))
        starts = np.cumsum(self.parts[order, 5]) - self.parts[order, 5]
        bounds = np.searchsorted(starts, self.size * np.arange(self.count + 1))
        bounds[-1] = len(order)
        self._orders = {epoch: (order, bounds)}
        return order, bounds


def _parts(shards: TokenSource, most: int, *, at_sentences: bool) -> np.ndarray:
    """int64 [parts, 7]: document, shard, first sentence, sentences, first token, tokens, whether the document ends.

    Documents with more than ``most`` tokens are split: with ``at_sentences`` into equal parts, whose bounds are moved
    back to the end of a sentence if it is near; otherwise after every ``most`` tokens.
    """
    index, tokens = shards.index, shards.index[:, 4]
    count = -(-tokens // most)
    owners = np.repeat(np.arange(len(index)), count)
    step = tokens / count if at_sentences else np.full(len(index), float(most))
    number = spread(np.zeros(len(index), np.int64), count)
    starts = index[owners, 3] + (number * step[owners]).astype(np.int64)
    ends_here = np.append(owners[1:] != owners[:-1], True)
    stops = np.where(ends_here, index[owners, 3] + tokens[owners], 0)
    first, last = np.empty_like(starts), np.empty_like(starts)
    bounds = np.searchsorted(index[owners, 0], np.arange(len(shards.files) + 1))  # of the shards among the parts
    for shard, files in enumerate(shards.files):
        sentences, rows = files["sentences"], slice(bounds[shard], bounds[shard + 1])
        if at_sentences:
            near = sentences[np.searchsorted(sentences, starts[rows], side="right") - 1]
            starts[rows] = np.where(starts[rows] - near < most // 2, near, starts[rows])
        stops[rows] = np.where(ends_here[rows], stops[rows], np.append(starts[rows][1:], 0)[: len(stops[rows])])
        first[rows] = np.searchsorted(sentences, starts[rows], side="right") - 1
        last[rows] = np.searchsorted(sentences, stops[rows], side="left")
    columns = (owners, index[owners, 0], first, last - first, starts, stops - starts, ends_here)
    return np.stack(columns, axis=1).astype(np.int64)
