"""``Masking``: selects the tokens of a batch that are predicted, and replaces them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_SPAN_DECAY = 0.8  # SpanBERT's lengths are geometric with p = 0.2


class Vocabulary(NamedTuple):
    """The properties of a vocabulary that masking needs."""

    mask: int  # the id of [MASK]
    ordinary: np.ndarray  # int64: every id that is not special
    starts_word: np.ndarray  # bool [vocab_size]


@dataclass(frozen=True)
class Masking:
    """BERT's masking and its variants.

    Args:
        probability: The fraction of text tokens that are predicted. Special tokens never are.
        whole_word: Whether either all tokens of a word are predicted or none (whole word masking).
        ngram: The maximum number of neighbouring tokens (words, with ``whole_word``) that are predicted together; n has
            a probability proportional to 1 / n, as in ALBERT.
        mask_share: The fraction of predicted tokens that are replaced by [MASK].
        random_share: The fraction of predicted tokens that are replaced by a random token; the others are unchanged.
        spans: As in SpanBERT: n has a probability proportional to 0.8^n, and the tokens of an n-gram are all masked,
            all random, or all unchanged.
    """

    probability: float = 0.15
    whole_word: bool = False
    ngram: int = 1
    mask_share: float = 0.8
    random_share: float = 0.1
    spans: bool = False

    def __post_init__(self) -> None:
        for name in ("probability", "mask_share", "random_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"Masking: {name}: expected a number in [0, 1], got {getattr(self, name)}")
        if self.mask_share + self.random_share > 1 + 1e-9:
            got = f"{self.mask_share} + {self.random_share}"
            raise ValueError(f"Masking: mask_share + random_share: expected at most 1, got {got}")
        if self.ngram < 1:
            raise ValueError(f"Masking: ngram: expected 1 or more, got {self.ngram}")

    def most(self, tokens: int) -> int:
        """The maximum number of predictions in a batch of ``tokens`` tokens."""
        return round(self.probability * tokens)

    def apply(
        self, ids: np.ndarray, text: np.ndarray, vocabulary: Vocabulary, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Masks ``ids`` in place.

        Args:
            ids: int64 [T].
            text: int64 [n], ascending: the positions of text tokens. There is a special token between two texts, so
                consecutive elements of ``text`` that are not consecutive numbers belong to different texts.
            vocabulary: The vocabulary of the ids.
            generator: The source of all random numbers.

        Returns:
            The positions, int64 [predictions], ascending, and the original ids there.
        """
        count = round(self.probability * len(text))
        chosen, groups = self._choose(ids, text, count, vocabulary, generator)
        positions = text[chosen]
        labels = ids[positions]
        draw = generator.random(len(positions), dtype=np.float32)
        if self.spans:
            draw = draw[np.searchsorted(groups, groups)]  # the draw of the span's first token
        ids[positions[draw < self.mask_share]] = vocabulary.mask
        random = positions[(draw >= self.mask_share) & (draw < self.mask_share + self.random_share)]
        ids[random] = vocabulary.ordinary[generator.integers(0, len(vocabulary.ordinary), len(random))]
        return positions, labels

    def _choose(
        self, ids: np.ndarray, text: np.ndarray, count: int, vocabulary: Vocabulary, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Selects ``count`` of the text tokens, or fewer if the next group does not fit. Returns their indices in
        ``text`` and their groups."""
        if not self.whole_word and self.ngram == 1:
            taken = np.zeros(len(text), dtype=bool)
            taken[generator.choice(len(text), count, replace=False, shuffle=False)] = True
            chosen = np.flatnonzero(taken)
            return chosen, chosen
        groups = self._groups(ids, text, vocabulary, generator)
        sizes = np.bincount(groups) if len(groups) else np.zeros(0, np.int64)
        order = generator.permutation(len(sizes))
        taken = np.zeros(len(sizes), dtype=bool)
        taken[order[np.cumsum(sizes[order]) <= count]] = True
        chosen = np.flatnonzero(taken[groups])
        return chosen, groups[chosen]

    def _groups(
        self, ids: np.ndarray, text: np.ndarray, vocabulary: Vocabulary, generator: np.random.Generator
    ) -> np.ndarray:
        """int64 [n], ascending from 0: the group of each text token. Tokens of a group are predicted together."""
        parts = np.ones(len(text), dtype=bool)  # whether a text starts here
        parts[1:] = np.diff(text) > 1
        if not self.whole_word:
            words: np.ndarray = np.arange(len(text))
        else:
            words = np.cumsum(vocabulary.starts_word[ids[text]] | parts) - 1
        if self.ngram == 1 or not len(text):
            return words
        # The words are divided into n-grams of random lengths; an n-gram also ends where a text ends.
        sizes = np.arange(1, self.ngram + 1)
        weights = np.cumsum(_SPAN_DECAY**sizes if self.spans else 1 / sizes)
        drawn = sizes[np.searchsorted(weights / weights[-1], generator.random(int(words[-1]) + 1), side="right")]
        grams = np.searchsorted(np.cumsum(drawn), words, side="right")
        begins = parts.copy()
        begins[1:] |= np.diff(grams) > 0
        result: np.ndarray = np.cumsum(begins) - 1
        return result
