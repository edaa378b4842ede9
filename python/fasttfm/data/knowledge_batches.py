"""``KnowledgeStream``: packed batches of texts with aligned entities, for ERNIE's three losses.

A sequence is ``[CLS] A [SEP] B [SEP]`` of one text's sentences (label 0), or with B from another text (label 1, half of
them). Tokens are masked as in BERT. For the denoising entity auto-encoder, 5% of the alignments of a batch get another
entity of the batch, 15% are removed and 80% are unchanged. The original entity of all of them is predicted, among the
entities of the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.assembly import Batch
from fasttfm.data.knowledge import MentionExample, align
from fasttfm.data.lines import DataError
from fasttfm.data.masking import Masking, Vocabulary
from fasttfm.data.sentences import sentence_starts
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.models.ernie_knowledge import EntityTargets
from fasttfm.nn import AlignedEntities

IGNORED = -100


@dataclass(frozen=True)
class EntityNoise:
    """The fractions of alignments that get another entity, and that are removed."""

    replaced: float = 0.05
    masked: float = 0.15

    def __post_init__(self) -> None:
        if min(self.replaced, self.masked) < 0 or self.replaced + self.masked > 1:
            got = f"{self.replaced} and {self.masked}"
            raise ValueError(f"EntityNoise: expected fractions of at least 0 with a sum of at most 1, got {got}")

    def apply(self, entities: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """The entities that a model reads instead of ``entities`` int64 [T], -1 for none. If there is only one entity,
        no alignment gets another one."""
        noisy = entities.copy()
        linked = np.flatnonzero(entities >= 0)
        draw = generator.random(len(linked))
        known = np.unique(entities[linked])
        other = linked[draw < self.replaced]
        if len(known) > 1:
            # A uniform draw from all entities but the alignment's own.
            number = generator.integers(0, len(known) - 1, len(other))
            true_index = np.searchsorted(known, entities[other])
            noisy[other] = known[number + (number >= true_index)]
        noisy[linked[(draw >= self.replaced) & (draw < self.replaced + self.masked)]] = -1
        return noisy


@dataclass(frozen=True)
class KnowledgeBatch(Batch):
    """A batch with the entities that the model reads and those that it predicts."""

    entities: AlignedEntities
    entity_targets: EntityTargets

    def _apply(self, change: Any) -> KnowledgeBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = (Tensor, AlignedEntities, EntityTargets)
        return replace(self, **{name: change(value) for name, value in values.items() if isinstance(value, moved)})


class _Sentence(NamedTuple):
    ids: list[int]
    entities: list[int]


class KnowledgeStream:
    """An endless stream of batches of at most ``tokens_per_batch`` tokens, in an order that the seed determines. Every
    iteration starts from the beginning.

    Args:
        examples: Texts of two sentences or more; shorter ones are only used as the second part of a pair.
        tokenizer: The model's tokenizer.
        known: The rows of the model's entities, by name; other entities are ignored.
        max_length: The maximum number of tokens in a sequence.
        tokens_per_batch: The maximum number of tokens in a batch, at least ``max_length``.
        masking, noise: Which tokens and entities are masked or replaced.
        seed: Random seed.
    """

    def __init__(
        self,
        examples: Sequence[MentionExample],
        tokenizer: Tokenizer,
        known: Mapping[str, int],
        *,
        max_length: int = 128,
        tokens_per_batch: int = 2048,
        masking: Masking | None = None,
        noise: EntityNoise | None = None,
        seed: int = 0,
    ) -> None:
        if not 8 <= max_length <= tokens_per_batch:
            got = f"{max_length} and {tokens_per_batch}"
            raise ValueError(f"KnowledgeStream: expected 8 <= max_length <= tokens_per_batch, got {got}")
        special = tokenizer.special
        if special.cls is None or special.sep is None or special.mask is None:
            raise DataError(f"KnowledgeStream: tokenizer: expected one with [CLS], [SEP] and [MASK], got {special}")
        self.cls, self.sep = special.cls, special.sep
        self.max_length, self.tokens_per_batch, self.seed = max_length, tokens_per_batch, seed
        self.masking, self.noise = masking or Masking(), noise or EntityNoise()
        ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), special.all())
        self.vocabulary = Vocabulary(special.mask, ordinary, tokenizer.starts_word)
        self.texts = [text for example in examples if (text := _sentences(example, tokenizer, known))]
        if len(self.texts) < 2 or all(len(text) < 2 for text in self.texts):
            raise DataError("KnowledgeStream: examples: expected two texts or more, with two sentences, got fewer")

    def __iter__(self) -> Iterator[KnowledgeBatch]:
        epoch = 0
        while True:
            random = np.random.default_rng([self.seed, epoch])
            rows: list[tuple[_Sentence, _Sentence, int]] = []
            size = 0
            for number in random.permutation(len(self.texts)).tolist():
                row = self._pair(number, random)
                if row is None:
                    continue
                length = len(row[0].ids) + len(row[1].ids) + 3
                if size + length > self.tokens_per_batch:
                    yield self._batch(rows, random)
                    rows, size = [], 0
                rows.append(row)
                size += length
            if rows:
                yield self._batch(rows, random)
            epoch += 1

    def _pair(self, number: int, random: np.random.Generator) -> tuple[_Sentence, _Sentence, int] | None:
        text = self.texts[number]
        if len(text) < 2:
            return None
        cut = int(random.integers(1, len(text)))
        first, second, label = _joined(text[:cut]), _joined(text[cut:]), 0
        if random.random() < 0.5:
            other = int(random.integers(len(self.texts) - 1))
            second, label = _joined(self.texts[other + (other >= number)]), 1
        room = self.max_length - 3
        kept = min(len(first.ids), max(room - len(second.ids), room // 2))
        return _cut(first, kept), _cut(second, room - kept), label

    def _batch(self, rows: list[tuple[_Sentence, _Sentence, int]], random: np.random.Generator) -> KnowledgeBatch:
        ids: list[int] = []
        entities: list[int] = []
        types: list[int] = []
        lengths = []
        for first, second, _ in rows:
            ids += [self.cls, *first.ids, self.sep, *second.ids, self.sep]
            entities += [-1, *first.entities, -1, *second.entities, -1]
            types += [0] * (len(first.ids) + 2) + [1] * (len(second.ids) + 1)
            lengths.append(len(first.ids) + len(second.ids) + 3)
        tokens, original = np.array(ids, dtype=np.int64), np.array(entities, dtype=np.int64)
        text = np.flatnonzero((tokens != self.cls) & (tokens != self.sep))
        bounds = np.append(0, np.cumsum(lengths))
        positions, labels = self.masking.apply(tokens, text, bounds, self.vocabulary, random)
        noisy = torch.from_numpy(self.noise.apply(original, random))
        cu_seqlens = torch.from_numpy(bounds.astype(np.int32))
        bound = 64 * -(-self.max_length // 64)
        return KnowledgeBatch(
            input_ids=torch.from_numpy(tokens),
            token_type_ids=torch.tensor(types, dtype=torch.int64, device="cpu"),
            cu_seqlens=cu_seqlens,
            max_seqlen=bound,
            positions=torch.from_numpy(positions),
            labels=torch.from_numpy(labels),
            sentence_labels=torch.tensor([label for *_, label in rows], dtype=torch.int64, device="cpu"),
            tokens=len(ids),
            predictions=len(positions),
            entities=AlignedEntities.of(noisy, cu_seqlens, bound),
            entity_targets=EntityTargets.of(torch.from_numpy(np.where(original >= 0, original, IGNORED))),
        )


def _sentences(example: MentionExample, tokenizer: Tokenizer, known: Mapping[str, int]) -> list[_Sentence]:
    """The sentences of a text as tokens."""
    aligned = align(tokenizer, example.text, example.entities, known)
    bounds = [0, *sentence_starts(example.text), len(example.text)]
    sentences = []
    for low, high in itertools.pairwise(bounds):
        covered = [index for index, (start, _) in enumerate(aligned.offsets) if low <= start < high]
        if covered:
            inside = slice(covered[0], covered[-1] + 1)
            sentences.append(_Sentence(aligned.ids[inside], aligned.entities[inside]))
    return sentences


def _joined(sentences: Sequence[_Sentence]) -> _Sentence:
    return _Sentence(
        [id for sentence in sentences for id in sentence.ids],
        [id for sentence in sentences for id in sentence.entities],
    )


def _cut(sentence: _Sentence, length: int) -> _Sentence:
    return _Sentence(sentence.ids[:length], sentence.entities[:length])
