"""``BatchStream``: packed batches of a corpus, in a reproducible order, for any number of ranks and workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fasttfm.data.blocks import CUT, MASK, Blocks, generator
from fasttfm.data.examples import SequenceFormat, Sequences, cut, pack, spread
from fasttfm.data.masking import Masking, Vocabulary
from fasttfm.data.shards import TokenShards


@dataclass(frozen=True)
class Batch:
    """A packed batch: T tokens of several concatenated sequences."""

    input_ids: Tensor  # int64 [T]
    token_type_ids: Tensor | None  # int64 [T]; None if sequences are not pairs
    cu_seqlens: Tensor  # int32 [sequences + 1]
    max_seqlen: int  # an upper bound of the lengths; a multiple of 64, the same for all batches
    positions: Tensor | None  # int64 [predictions]: the positions of predicted tokens; None for causal objectives
    labels: Tensor | None  # int64 [predictions]: the original tokens at these positions
    sentence_labels: Tensor | None  # int64 [sequences]: 0 for consecutive sentences, 1 for random or swapped ones
    tokens: int
    predictions: int

    @property
    def sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Any) -> Batch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if isinstance(value, Tensor)})


class _Position(NamedTuple):
    """A position in the stream between two steps: the next batch is batch ``offset`` of a block."""

    epoch: int = 0
    block: int = 0
    offset: int = 0


class BatchStream:
    """Batches of at most ``tokens_per_batch`` tokens, nearly full except for the last one of each block.

    Batch i is a function of the corpus, the settings and i. Of ``world_size`` ranks, rank r gets the batches r, r +
    world_size, ... of the stream of one rank; the number of ``workers`` does not change them. Iterating again continues
    where the last iteration stopped, also after ``load_state_dict``; after the last of ``epochs`` it starts again.

    Args:
        shards: The corpus.
        sequence_format: The format of sequences.
        masking: Which tokens are masked; ``Masking()`` by default, None for causal objectives.
        tokens_per_batch: The maximum number of tokens in a batch, at least the ``max_length`` of ``sequence_format``.
        seed: Random seed.
        rank: The rank of this process.
        world_size: The number of ranks.
        workers: The number of processes that prepare batches in advance; 0 prepares them on demand.
        epochs: The number of epochs; ranks may then differ by one batch. By default the stream is endless.
        pin_memory: Whether batches are in pinned memory.
        block_tokens: Sequences are shuffled within blocks of this many tokens, documents within the whole corpus.
    """

    def __init__(
        self,
        shards: TokenShards,
        sequence_format: SequenceFormat,
        masking: Masking | None = None,
        *,
        tokens_per_batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        epochs: int | None = None,
        pin_memory: bool = False,
        block_tokens: int = 1 << 22,
    ) -> None:
        if masking is None and sequence_format.masked:
            masking = Masking()
        self._plans = _Plans(shards, sequence_format, masking, tokens_per_batch, seed, block_tokens)
        if not 0 <= rank < world_size:
            raise _bad("rank", f"one in [0, {world_size})", rank)
        if workers < 0:
            raise _bad("workers", "0 or more", workers)
        if epochs is not None and epochs < 1:
            raise _bad("epochs", "1 or more, or None", epochs)
        self.rank, self.world_size, self.epochs = rank, world_size, epochs
        self.workers, self.pin_memory = workers, pin_memory
        self._position, self._batches = _Position(), 0

    def __iter__(self) -> Iterator[Batch]:
        pin = self.pin_memory and torch.cuda.is_available()
        numbered = _Numbered(self._plans, self._position, self.rank, self.world_size, self.epochs)
        batches: Iterable[tuple[tuple[int, int, int], Batch]] = numbered
        if self.workers:
            # Without its own generator the loader would advance torch's, whose state the training uses.
            batches = DataLoader(
                numbered,
                batch_size=None,
                num_workers=self.workers,
                pin_memory=pin,
                prefetch_factor=4,
                generator=torch.Generator("cpu"),
            )
        for position, batch in batches:
            self._position, self._batches = _Position(*position), self._batches + 1
            yield batch.pin_memory() if pin and not self.workers else batch
        self._position, self._batches = _Position(), 0

    @property
    def max_predictions(self) -> int | None:
        """An upper bound of the predictions of a batch; None for causal objectives."""
        masking = self._plans.masking
        return None if masking is None else masking.most(self._plans.tokens_per_batch)

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream, as plain values. It is the same for all ranks, and another number of ranks can
        resume from it."""
        return {**self._plans.identity, "batches": self._batches * self.world_size, **self._position._asdict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after the batch at which ``state_dict`` was called. Raises ValueError for other data or
        settings."""
        for name, value in self._plans.identity.items():
            if state.get(name) != value:
                raise _bad(f"state[{name!r}]", f"this stream's {value!r}", repr(state.get(name)))
        if state["batches"] % self.world_size:
            raise _bad("state['batches']", f"a multiple of the {self.world_size} ranks", state["batches"])
        self._batches = state["batches"] // self.world_size
        self._position = _Position(state["epoch"], state["block"], state["offset"])


class _Numbered(IterableDataset[tuple[tuple[int, int, int], Batch]]):
    """The batches of a rank, each with the position after it. Each of W workers makes every W-th batch."""

    def __init__(self, plans: _Plans, position: _Position, rank: int, world_size: int, epochs: int | None) -> None:
        self.plans, self.position, self.rank, self.world_size, self.epochs = plans, position, rank, world_size, epochs

    def __iter__(self) -> Iterator[tuple[tuple[int, int, int], Batch]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch, block, offset = self.position
        offset += self.rank + worker * self.world_size
        empty = 0
        while self.epochs is None or epoch < self.epochs:
            plan = self.plans.plan(epoch, block)
            empty = 0 if plan.batches else empty + 1
            if empty >= self.plans.blocks.count:
                raise ValueError(self.plans.no_sequences())
            while offset < plan.batches:
                # The first batch of all ranks' next step.
                following = (epoch, block, offset - self.rank + self.world_size)
                yield following, self.plans.batch(plan, epoch, block, offset)
                offset += self.world_size * workers
            offset -= plan.batches
            block += 1
            if block == self.plans.blocks.count:
                epoch, block = epoch + 1, 0


class _Plan(NamedTuple):
    """A block's sequences, and how they are divided into batches."""

    tokens: np.ndarray
    sequences: Sequences
    order: np.ndarray
    bounds: np.ndarray

    @property
    def batches(self) -> int:
        return len(self.bounds) - 1


class _Plans:
    """Computes any batch of the stream of one rank, given its epoch, block and number in the block."""

    def __init__(
        self,
        shards: TokenShards,
        sequence_format: SequenceFormat,
        masking: Masking | None,
        tokens_per_batch: int,
        seed: int,
        block_tokens: int,
    ) -> None:
        if masking is not None and not sequence_format.masked:
            raise _bad("masking", "None with a causal sequence_format", masking)
        if tokens_per_batch < sequence_format.max_length:
            raise _bad("tokens_per_batch", f"at least max_length, {sequence_format.max_length}", tokens_per_batch)
        if not 0 <= seed < 1 << 64:
            raise _bad("seed", "a number in [0, 2**64)", seed)
        if block_tokens < 1:
            raise _bad("block_tokens", "1 or more", block_tokens)
        if not shards.documents:
            raise _bad("shards", "documents", "none")
        if sequence_format.kind == "nsp" and shards.documents < 2:
            raise _bad("shards", "two documents or more for next sentences (nsp)", shards.documents)
        self.sequence_format, self.masking = sequence_format, masking
        self.tokens_per_batch, self.seed = tokens_per_batch, seed
        self.special = shards.special
        for name in ("cls", "sep", "mask") if sequence_format.masked else ():
            if getattr(self.special, name) is None:
                raise _bad("shards", f"a tokenizer with a {name} token for {sequence_format.kind}", "one without")
        block = max(block_tokens, 16 * tokens_per_batch)
        self.blocks = Blocks(shards, sequence_format, block, seed)
        ordinary = np.setdiff1d(np.arange(shards.vocab_size), self.special.all())
        self.vocabulary = Vocabulary(self.special.mask or 0, ordinary, shards.starts_word)
        self.identity = {
            "corpus": shards.fingerprint,
            "sequence_format": str(asdict(sequence_format)),
            "masking": str(masking and asdict(masking)),
            "tokens_per_batch": tokens_per_batch,
            "block_tokens": block,
            "seed": seed,
        }
        self._made: tuple[tuple[int, int], _Plan] | None = None

    def no_sequences(self) -> str:
        """The error message for a corpus without sequences."""
        kind = self.sequence_format.kind
        return f"BatchStream: shards: expected documents of two sentences or more for {kind}, got none in the corpus"

    def plan(self, epoch: int, number: int) -> _Plan:
        """The plan of a block; the last plan is cached."""
        if self._made is None or self._made[0] != (epoch, number):
            self._made = (epoch, number), self._plan_of(epoch, number)
        return self._made[1]

    def _plan_of(self, epoch: int, number: int) -> _Plan:
        block = self.blocks.load(epoch, number)
        random = generator(self.seed, CUT, epoch, number)
        sequences = cut(self.sequence_format, block.documents, random, end_token=self.special.eos is not None)
        sequences = sequences.take(random.permutation(len(sequences.length)))
        return _Plan(block.tokens, sequences, *pack(sequences.length, self.tokens_per_batch))

    def batch(self, plan: _Plan, epoch: int, block: int, number: int) -> Batch:
        rows = plan.sequences.take(plan.order[plan.bounds[number] : plan.bounds[number + 1]])
        boundaries = np.append(0, np.cumsum(rows.length))
        ids = np.empty(boundaries[-1], dtype=np.int64)
        is_text = np.ones(len(ids), dtype=bool)
        for special, id in self._special_positions(rows, boundaries):
            ids[special] = id
            is_text[special] = False
        text = np.flatnonzero(is_text)
        parts = np.stack([rows.first, rows.second, rows.first_length, rows.second_length], axis=1)
        ids[text] = plan.tokens[spread(parts[:, :2].ravel(), parts[:, 2:].ravel())]
        types = positions = labels = None
        predictions = len(ids) - len(rows.length)
        if self.sequence_format.pairs:
            types = np.zeros_like(ids)
            types[spread(boundaries[1:] - rows.second_length - 1, rows.second_length + 1)] = 1
        if self.masking is not None:
            random = generator(self.seed, MASK, epoch, block, number)
            positions, labels = self.masking.apply(ids, text, boundaries, self.vocabulary, random)
            predictions = len(positions)
        return Batch(
            input_ids=torch.from_numpy(ids),
            token_type_ids=None if types is None else torch.from_numpy(types),
            cu_seqlens=torch.from_numpy(boundaries.astype(np.int32)),
            max_seqlen=64 * math.ceil(self.sequence_format.max_length / 64),
            positions=None if positions is None else torch.from_numpy(positions),
            labels=None if labels is None else torch.from_numpy(labels),
            sentence_labels=torch.from_numpy(rows.label) if self.sequence_format.pairs else None,
            tokens=len(ids),
            predictions=predictions,
        )

    def _special_positions(self, rows: Sequences, boundaries: np.ndarray) -> Iterator[tuple[np.ndarray, int | None]]:
        """The positions of special tokens, and their ids."""
        if not self.sequence_format.masked:
            if self.special.eos is not None:
                yield boundaries[1:][rows.label == 1] - 1, self.special.eos
            return
        yield boundaries[:-1], self.special.cls
        yield boundaries[1:] - 1, self.special.sep
        if self.sequence_format.pairs:
            yield boundaries[:-1] + 1 + rows.first_length, self.special.sep


def _bad(argument: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"BatchStream: {argument}: expected {expected}, got {got}")
