"""Corpora in which every token identifies its position: ids count through the documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fasttfm import data

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>")
FIRST = len(SPECIAL)  # the id of the first word


def word_tokenizer(words: int, *, special: Sequence[str] = SPECIAL) -> data.Tokenizer:
    """Word ``w7`` has the id FIRST + 7; every fourth token continues the previous word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {name: id for id, name in enumerate([*special, *(f"w{i}" for i in range(words))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    roles = dict(zip(("pad", "unk", "cls", "sep", "mask", "eos"), range(len(special)), strict=False))
    return data.Tokenizer(backend, data.SpecialIds(**roles))


@dataclass(frozen=True)
class Traced:
    """A corpus in which no word comes twice."""

    shards: data.TokenShards
    document: np.ndarray  # by id: the document's number
    sentence: np.ndarray  # by id: the sentence's number, through all documents
    starts: np.ndarray  # by id: whether a sentence begins

    @property
    def words(self) -> int:
        return len(self.document) - FIRST


def trace(folder: Path, documents: Sequence[Sequence[int]], *, shard_characters: int = 1 << 24) -> Traced:
    """Prepares documents that are given by the lengths of their sentences."""
    texts, where, word, sentence = [], [], 0, 0
    for number, lengths in enumerate(documents):
        lines = []
        for length in lengths:
            lines.append(" ".join(f"w{i}" for i in range(word, word + length)))
            where += [(number, sentence, i == 0) for i in range(length)]
            word, sentence = word + length, sentence + 1
        texts.append("\n".join(lines))
    table = np.array([(-1, -1, 0)] * FIRST + where)
    shards = data.prepare(
        iter(texts), word_tokenizer(word), folder, progress=False, workers=1, shard_characters=shard_characters
    )
    return Traced(shards, table[:, 0], table[:, 1], table[:, 2].astype(bool))
