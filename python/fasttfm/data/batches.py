"""``BatchStream``: packed batches of a corpus, in a reproducible order, for any number of ranks and workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fasttfm.data.assembly import Batch, BatchMaker, Plan, bad_argument
from fasttfm.data.blocks import CUT, MASK, Blocks, generator
from fasttfm.data.examples import SequenceFormat
from fasttfm.data.masking import Masking
from fasttfm.data.shards import TokenShards


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
        return self._plans.maker.max_predictions

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
        self.maker = BatchMaker(
            "BatchStream",
            sequence_format,
            masking,
            tokens_per_batch,
            special=shards.special,
            starts_word=shards.starts_word,
        )
        if not 0 <= seed < 1 << 64:
            raise _bad("seed", "a number in [0, 2**64)", seed)
        if block_tokens < 1:
            raise _bad("block_tokens", "1 or more", block_tokens)
        if not shards.documents:
            raise _bad("shards", "documents", "none")
        if sequence_format.kind == "nsp" and shards.documents < 2:
            raise _bad("shards", "two documents or more for next sentences (nsp)", shards.documents)
        block = max(block_tokens, 16 * tokens_per_batch)
        self.blocks = Blocks(shards, sequence_format, block, seed)
        self.sequence_format, self.seed = sequence_format, seed
        self.identity = {"corpus": shards.fingerprint, **self.maker.identity, "block_tokens": block, "seed": seed}
        self._made: tuple[tuple[int, int], Plan] | None = None

    def no_sequences(self) -> str:
        """The error message for a corpus without sequences."""
        kind = self.sequence_format.kind
        return f"BatchStream: shards: expected documents of two sentences or more for {kind}, got none in the corpus"

    def plan(self, epoch: int, number: int) -> Plan:
        """The plan of a block; the last plan is cached."""
        if self._made is None or self._made[0] != (epoch, number):
            self._made = (epoch, number), self._plan_of(epoch, number)
        return self._made[1]

    def _plan_of(self, epoch: int, number: int) -> Plan:
        return self.maker.plan(self.blocks.load(epoch, number), generator(self.seed, CUT, epoch, number))

    def batch(self, plan: Plan, epoch: int, block: int, number: int) -> Batch:
        return self.maker.batch(plan, number, generator(self.seed, MASK, epoch, block, number))


def _bad(argument: str, expected: str, got: Any) -> ValueError:
    return bad_argument("BatchStream", argument, expected, got)
