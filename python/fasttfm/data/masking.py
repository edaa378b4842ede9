"""``Masking``: which tokens of a batch are predicted, and what replaces them; a whole batch at a time."""

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
        probability: Share of the texts' tokens that are predicted; never a special token.
        whole_word: All tokens of a word or none.
        ngram: Up to so many neighbouring tokens (words, with ``whole_word``) together, n of them with a probability in
            proportion to 1 / n, as ALBERT's.
        mask_share: Of the predicted tokens, those that are replaced by [MASK].
        random_share: And those that are replaced by a random token; the others stay.
        spans: As SpanBERT's: n-grams of up to ``ngram`` have n with a probability in proportion to 0.8^n, and the
            tokens of one are all masked, all random, or all kept.
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
                raise ValueError(f"Masking: {name}: expected a share in [0, 1], got {getattr(self, name)}")
        if self.mask_share + self.random_share > 1 + 1e-9:
            got = f"{self.mask_share} + {self.random_share}"
            raise ValueError(f"Masking: mask_share + random_share: expected at most 1, got {got}")
        if self.ngram < 1:
            raise ValueError(f"Masking: ngram: expected 1 or more, got {self.ngram}")

    def most(self, tokens: int) -> int:
        """The largest number of predictions of a batch of that many tokens."""
        return round(self.probability * tokens)

    def apply(
        self, ids: np.ndarray, text: np.ndarray, vocabulary: Vocabulary, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Masks ``ids`` in place.

        Args:
            ids: int64 [T].
            text: int64 [n], ascending: where the tokens of the texts are. Between two parts of texts is a special
                token, so that neighbours in ``text`` that are no neighbours in ``ids`` belong to different parts.
            vocabulary: The vocabulary of the ids.
            generator: Everything random comes from it.

        Returns: positions, int64 [predictions], ascending, and the ids that were there.
        """
        count = round(self.probability * len(text))
        chosen, groups = self._choose(ids, text, count, vocabulary, generator)
        positions = text[chosen]
        labels = ids[positions]
        draw = generator.random(len(positions), dtype=np.float32)
        if self.spans:
            draw = draw[np.searchsorted(groups, groups)]  # that of the span's first token
        ids[positions[draw < self.mask_share]] = vocabulary.mask
        random = positions[(draw >= self.mask_share) & (draw < self.mask_share + self.random_share)]
        ids[random] = vocabulary.ordinary[generator.integers(0, len(vocabulary.ordinary), len(random))]
        return positions, labels

    def _choose(
        self, ids: np.ndarray, text: np.ndarray, count: int, vocabulary: Vocabulary, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which of the text's tokens: ``count``, or fewer by less than a word or an n-gram; and the group of each."""
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
        """int64 [n], ascending from 0: which tokens of the text are predicted together."""
        parts = np.ones(len(text), dtype=bool)  # a part of a text begins
        parts[1:] = np.diff(text) > 1
        if not self.whole_word:
            words: np.ndarray = np.arange(len(text))
        else:
            words = np.cumsum(vocabulary.starts_word[ids[text]] | parts) - 1
        if self.ngram == 1 or not len(text):
            return words
        # Lengths of n-grams, side by side over all words; where a part begins, one ends early.
        sizes = np.arange(1, self.ngram + 1)
        weights = np.cumsum(_SPAN_DECAY**sizes if self.spans else 1 / sizes)
        drawn = sizes[np.searchsorted(weights / weights[-1], generator.random(int(words[-1]) + 1), side="right")]
        grams = np.searchsorted(np.cumsum(drawn), words, side="right")
        begins = parts.copy()
        begins[1:] |= np.diff(grams) > 0
        result: np.ndarray = np.cumsum(begins) - 1
        return result
