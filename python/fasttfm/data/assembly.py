"""``BatchMaker``: divides the sequences of a block into packed batches, and makes each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.blocks import Block
from fasttfm.data.examples import SequenceFormat, Sequences, cut, pack, spread
from fasttfm.data.masking import Masking, Vocabulary
from fasttfm.data.tokenizer import SpecialIds


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
        return self._apply(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self._apply(lambda tensor: tensor.pin_memory())

    def _apply(self, change: Any) -> Batch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if isinstance(value, Tensor)})


class Plan(NamedTuple):
    """A block's sequences, and how they are divided into batches."""

    tokens: np.ndarray
    sequences: Sequences
    order: np.ndarray
    bounds: np.ndarray

    @property
    def batches(self) -> int:
        return len(self.bounds) - 1


class BatchMaker:
    """Makes the batches of a stream.

    Args:
        stream: The name of the stream's class, for messages.
        sequence_format: The format of sequences.
        masking: Which tokens are masked; ``Masking()`` by default, None for causal objectives.
        tokens_per_batch: The maximum number of tokens in a batch.
        special: The special tokens of the vocabulary.
        starts_word: bool [vocabulary]: whether a token starts a word.
    """

    def __init__(
        self,
        stream: str,
        sequence_format: SequenceFormat,
        masking: Masking | None,
        tokens_per_batch: int,
        *,
        special: SpecialIds,
        starts_word: np.ndarray,
    ) -> None:
        if masking is None and sequence_format.masked:
            masking = Masking()
        if masking is not None and not sequence_format.masked:
            raise bad_argument(stream, "masking", "None with a causal sequence_format", masking)
        if tokens_per_batch < sequence_format.max_length:
            expected = f"at least max_length, {sequence_format.max_length}"
            raise bad_argument(stream, "tokens_per_batch", expected, tokens_per_batch)
        self.sequence_format, self.masking, self.tokens_per_batch = sequence_format, masking, tokens_per_batch
        self.special = special
        for name in ("cls", "sep", "mask") if sequence_format.masked else ():
            if getattr(special, name) is None:
                expected = f"a tokenizer with a {name} token for {sequence_format.kind}"
                raise bad_argument(stream, "shards", expected, "one without")
        ordinary = np.setdiff1d(np.arange(len(starts_word)), special.all())
        self.vocabulary = Vocabulary(special.mask or 0, ordinary, starts_word)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings, as plain values that a checkpoint stores."""
        return {
            "sequence_format": str(asdict(self.sequence_format)),
            "masking": str(self.masking and asdict(self.masking)),
            "tokens_per_batch": self.tokens_per_batch,
        }

    @property
    def max_predictions(self) -> int | None:
        """An upper bound of the predictions of a batch; None for causal objectives."""
        return None if self.masking is None else self.masking.most(self.tokens_per_batch)

    def plan(self, block: Block, random: np.random.Generator) -> Plan:
        """Cuts and shuffles the sequences of a block, and divides them into batches."""
        sequences = cut(self.sequence_format, block.documents, random, end_token=self.special.eos is not None)
        sequences = sequences.take(random.permutation(len(sequences.length)))
        return Plan(block.tokens, sequences, *pack(sequences.length, self.tokens_per_batch))

    def no_batches(self) -> Plan:
        """The plan of a block without sequences."""
        nothing = np.zeros(0, np.int64)
        return Plan(nothing, Sequences(*[nothing] * len(Sequences._fields)), nothing, np.zeros(1, np.int64))

    def batch(self, plan: Plan, number: int, random: np.random.Generator) -> Batch:
        """Batch ``number`` of a plan; ``random`` chooses the masked tokens."""
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


def bad_argument(stream: str, argument: str, expected: str, got: Any) -> ValueError:
    return ValueError(f"{stream}: {argument}: expected {expected}, got {got}")
