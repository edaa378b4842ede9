"""``ShardStream``: packed batches of files that are read and tokenized while a model trains.

A step has a fixed number of batches, and batch i of every step has a lane of its own: a sequence of files, other ones
than those of the other lanes, in a random order in each epoch. A lane's documents are read one after the other and
collected into windows, whose sequences are shuffled and packed as the blocks of ``BatchStream`` are. Rank r of R has
the lanes r, r + R, ..., so ranks read different files, and a lane's batches do not depend on the number of ranks.

The position in a lane is that of its window: epoch, file, position in the file, and the window's number, from which its
random numbers follow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fasttfm.data.assembly import Batch, BatchMaker, Plan, bad_argument
from fasttfm.data.blocks import CUT, MASK, ORDER, Blocks, generator
from fasttfm.data.examples import SequenceFormat
from fasttfm.data.lines import data_error
from fasttfm.data.masking import Masking
from fasttfm.data.shard_files import Row, ShardFile, shard_files
from fasttfm.data.shards import index_of
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.data.tokenizing import Arrays, Pending, tokenizers

CHARACTERS = 4  # of text for a token, about


@dataclass(frozen=True)
class StreamedShards:
    """The documents of files that are read when they are needed. ``open`` lists the files; ``split`` makes a validation
    set."""

    files: tuple[ShardFile, ...]
    tokenizer: Tokenizer
    column: str = "text"
    part: tuple[float, float] = (0.0, 1.0)  # a document belongs to it if its random number is between these

    @staticmethod
    def open(
        source: str | Path | Sequence[str | Path], tokenizer: Tokenizer, *, column: str = "text"
    ) -> StreamedShards:
        """Lists the files of a source, without reading them.

        Args:
            source: Addresses of fsspec (``s3://bucket/part-*.parquet``), paths, glob patterns or folders of .parquet,
                .jsonl, .tar (WebDataset) or .npy files (token ids); .jsonl and .tar may be compressed by gzip.
            tokenizer: The tokenizer of the texts, or the one that made the token ids.
            column: The column or field that has the text.
        """
        return StreamedShards(tuple(shard_files(source)), tokenizer, column)

    def split(self, held_out: float = 0.02) -> tuple[StreamedShards, StreamedShards]:
        """Splits the documents into a training set and a validation set with a fraction of about ``held_out``, by a
        hash of the file's name and the document's position."""
        if not 0 < held_out < 1:
            raise ValueError(f"StreamedShards.split: held_out: expected a fraction between 0 and 1, got {held_out}")
        low, high = self.part
        middle = high - held_out * (high - low)
        return replace(self, part=(low, middle)), replace(self, part=(middle, high))

    @property
    def fingerprint(self) -> str:
        """A hash of the files' names and sizes, the tokenizer and the part."""
        files = [(file.name, file.size) for file in self.files]
        state = json.dumps([files, self.tokenizer.fingerprint, self.column, self.part])
        return hashlib.blake2b(state.encode(), digest_size=16).hexdigest()

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def rows(self, number: int, start: int, division: tuple[int, int] = (0, 1)) -> Iterator[tuple[int, Row]]:
        """Yields the following position and the content of this part's rows in file ``number``, from the position
        ``start`` on; of these, with ``division`` (i, n) the i-th of n parts."""
        file, (index, count) = self.files[number], division
        special = self.tokenizer.special
        end = special.sep if special.eos is None else special.eos
        low, high = self.part
        for position, following, row in file.rows(start, column=self.column, end=end):
            digest = hashlib.blake2b(f"{file.name} {position}".encode(), digest_size=16).digest()
            inside = low <= int.from_bytes(digest[:8], "little") / 2**64 < high
            if inside and int.from_bytes(digest[8:], "little") % count == index:
                yield following, self._checked(row, file, position)

    def _checked(self, row: Row, file: ShardFile, position: int) -> Row:
        if isinstance(row, np.ndarray) and int(row.max()) >= self.tokenizer.vocab_size:
            expected = f"ids below {self.tokenizer.vocab_size}, the tokenizer's number of entries"
            raise data_error(f"{file.address}, token {position + int(row.argmax())}", expected, f"{int(row.max())}")
        return row


class Place(NamedTuple):
    """Where a window begins, in plain numbers: epoch, the file's number among those of the lane, the position in the
    file; the window's number, and the batches of the lane before it."""

    epoch: int = 0
    file: int = 0
    position: int = 0
    window: int = 0
    batches: int = 0


class ShardStream:
    """Batches of at most ``tokens_per_batch`` tokens, from files that are read while they are used; it has no end.

    Batch i is a function of the files, the settings and i. Of ``world_size`` ranks, rank r gets the batches r, r +
    world_size, ... of the stream of one rank; the number of ``workers`` does not change them. Iterating again continues
    where the last iteration stopped, also after ``load_state_dict``.

    Args:
        shards: The files. There should be ``batches_per_step`` or more: with fewer, several lanes read each file, and
            each takes its own part of the documents.
        sequence_format: The format of sequences.
        masking: Which tokens are masked; ``Masking()`` by default, None for causal objectives.
        tokens_per_batch: The maximum number of tokens in a batch, at least the ``max_length`` of ``sequence_format``.
        seed: Random seed.
        batches_per_step: The number of lanes: batch i has lane i modulo this number.
        rank: The rank of this process.
        world_size: The number of ranks.
        workers: The number of processes that tokenize in advance; 0 tokenizes in this process, on demand.
        window_tokens: Sequences are shuffled within windows of about this many tokens (4 characters each).
    """

    def __init__(
        self,
        shards: StreamedShards,
        sequence_format: SequenceFormat,
        masking: Masking | None = None,
        *,
        tokens_per_batch: int,
        seed: int,
        batches_per_step: int = 1,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        window_tokens: int = 1 << 22,
    ) -> None:
        self._maker = BatchMaker(
            "ShardStream",
            sequence_format,
            masking,
            tokens_per_batch,
            special=shards.tokenizer.special,
            starts_word=shards.tokenizer.starts_word,
        )
        for name, value in (("batches_per_step", batches_per_step), ("window_tokens", window_tokens)):
            if value < 1:
                raise bad_argument("ShardStream", name, "1 or more", value)
        if not 0 <= seed < 1 << 64:
            raise bad_argument("ShardStream", "seed", "a number in [0, 2**64)", seed)
        if not 0 <= rank < world_size:
            raise bad_argument("ShardStream", "rank", f"one in [0, {world_size})", rank)
        if workers < 0:
            raise bad_argument("ShardStream", "workers", "0 or more", workers)
        self.shards, self.rank, self.world_size, self.workers = shards, rank, world_size, workers
        self._lanes = _Lanes(shards, sequence_format, batches_per_step, CHARACTERS * window_tokens, seed)
        self._identity = {
            "corpus": shards.fingerprint,
            **self._maker.identity,
            "window_tokens": window_tokens,
            "batches_per_step": batches_per_step,
            "seed": seed,
        }
        self._batches = 0
        lanes = {number % batches_per_step for number in range(rank, rank + world_size * batches_per_step, world_size)}
        self._places = dict.fromkeys(sorted(lanes), Place())

    def __iter__(self) -> Iterator[Batch]:
        with tokenizers(self.shards.tokenizer, self.workers) as tokenize:
            lanes = {lane: self._lanes.read(lane, place) for lane, place in self._places.items()}
            windows = {
                lane: _Windows(self, lane, place, tokenize(lanes[lane], lambda window: window.rows))
                for lane, place in self._places.items()
            }
            while True:
                number = self._batches * self.world_size + self.rank
                lane = number % self._lanes.count
                window, index = windows[lane].of_batch(number // self._lanes.count)
                self._places[lane] = window.place
                self._batches += 1
                random = generator(self._lanes.seed, MASK, lane, window.place.window, index)
                yield self._maker.batch(window.plan, index, random)

    @property
    def max_predictions(self) -> int | None:
        """An upper bound of the predictions of a batch; None for causal objectives."""
        return self._maker.max_predictions

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, as plain values: for each of this rank's lanes a ``Place``. ``joined`` makes of
        all ranks' states the one that any number of ranks can resume from."""
        places = {lane: list(place) for lane, place in self._places.items()}
        return {**self._identity, "batches": self._batches * self.world_size, "lanes": places}

    @staticmethod
    def joined(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of the whole stream, of the states of all ranks."""
        lanes = {lane: place for state in states for lane, place in state["lanes"].items()}
        return {**states[0], "lanes": dict(sorted(lanes.items()))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the batch at which ``state_dict`` was called. Raises ValueError for other data or
        settings."""
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise bad_argument("ShardStream", f"state[{name!r}]", f"this stream's {value!r}", repr(state.get(name)))
        if state["batches"] % self.world_size:
            expected = f"a multiple of the {self.world_size} ranks"
            raise bad_argument("ShardStream", "state['batches']", expected, state["batches"])
        if absent := self._places.keys() - state["lanes"].keys():
            got = f"none for {', '.join(map(str, sorted(absent)))}"
            raise bad_argument("ShardStream", "state['lanes']", "the lanes of this rank (the joined state)", got)
        self._batches = state["batches"] // self.world_size
        self._places = {lane: Place(*state["lanes"][lane]) for lane in self._places}


# ---- lanes -----------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """The documents of a window, and where they begin."""

    place: Place
    rows: list[Row]


class _Lanes:
    """The documents of each lane, by windows."""

    def __init__(
        self, shards: StreamedShards, sequence_format: SequenceFormat, count: int, characters: int, seed: int
    ) -> None:
        self.shards, self.sequence_format, self.count = shards, sequence_format, count
        self.characters, self.seed = characters, seed
        self.divisions = -(-count // len(shards.files))  # of each file, so that every lane has one

    def read(self, lane: int, place: Place) -> Iterator[_Rows]:
        """Yields the windows of a lane from a place on, over all epochs. ``Place.batches`` is not set."""
        epoch, file, position, window, _ = place
        least = 2 if self.sequence_format.kind == "nsp" else 1  # documents: the second sentence may be of another one
        while True:
            order = generator(self.seed, ORDER, epoch).permutation(len(self.shards.files) * self.divisions)
            order = order[lane :: self.count]
            begin, rows, size = Place(epoch, file, position, window), list[Row](), 0
            for number in range(file, len(order)):
                shard, division = divmod(int(order[number]), self.divisions)
                for following, row in self.shards.rows(shard, position, (division, self.divisions)):
                    rows.append(row)
                    size += len(row) * (1 if isinstance(row, str) else CHARACTERS)
                    if size >= self.characters and len(rows) >= least:
                        yield _Rows(begin, rows)
                        window += 1
                        begin, rows, size = Place(epoch, number, following, window), [], 0
                position = 0
            yield _Rows(begin, rows)  # also without rows, so that a lane without documents is noticed
            epoch, file, window = epoch + 1, 0, window + 1


class _Window(NamedTuple):
    place: Place
    plan: Plan


@dataclass(frozen=True)
class _WindowTokens:
    """The tokens of a window, as ``Blocks`` reads them."""

    index: np.ndarray
    files: tuple[dict[str, np.ndarray], ...]
    tokens: int


class _Windows:
    """The windows of a lane, one after the other."""

    def __init__(self, stream: ShardStream, lane: int, place: Place, pending: Pending[_Rows]) -> None:
        self.stream, self.lane, self.pending = stream, lane, pending
        self.batches = place.batches  # before the next window
        self.window: _Window | None = None
        self.used_epoch = place.epoch  # the last one with a batch

    def of_batch(self, number: int) -> tuple[_Window, int]:
        """The window that has a batch of the lane, and the batch's number in it. Numbers are ascending."""
        while self.window is None or number >= self.batches:
            read, arrays = self.pending.next()
            plan = self._plan(read.place.window, arrays)
            self.window = _Window(read.place._replace(batches=self.batches), plan)
            self.batches += plan.batches
            if plan.batches:
                self.used_epoch = read.place.epoch
            elif read.place.epoch > self.used_epoch + 1:
                lanes = self.stream._lanes
                expected = f"documents for {lanes.sequence_format.kind} in each of {lanes.count} parts"
                files = f"none in part {self.lane} of {len(self.stream.shards.files)} files"
                raise bad_argument("ShardStream", "shards", f"{expected} (batches_per_step)", files)
        return self.window, number - self.window.place.batches

    def _plan(self, window: int, arrays: Arrays) -> Plan:
        stream = self.stream
        sequence_format, seed = stream._lanes.sequence_format, stream._lanes.seed
        tokens = len(arrays["tokens"])
        source = _WindowTokens(index_of([arrays]), (arrays,), tokens)
        random = generator(seed, CUT, self.lane, window)
        if not tokens or (sequence_format.kind == "nsp" and len(source.index) < 2):
            return stream._maker.no_batches()
        return stream._maker.plan(Blocks(source, sequence_format, tokens, seed).load(0, 0), random)
