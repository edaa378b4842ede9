"""``Masking``: selects the tokens of each sequence that are predicted, and replaces them."""

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
        probability: The fraction of each sequence's text tokens that are predicted. Special tokens never are.
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
        return int(self._rounded(tokens))

    def apply(
        self,
        ids: np.ndarray,
        text: np.ndarray,
        bounds: np.ndarray,
        vocabulary: Vocabulary,
        generator: np.random.Generator,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Masks ``ids`` in place.

        Args:
            ids: int64 [T].
            text: int64 [n], ascending: the positions of text tokens. There is a special token between two texts, so
                consecutive elements of ``text`` that are not consecutive numbers belong to different texts.
            bounds: int64 [sequences + 1]: sequence i has the positions from bounds[i] to bounds[i + 1].
            vocabulary: The vocabulary of the ids.
            generator: The source of all random numbers.

        Returns:
            The positions, int64 [predictions], ascending, and the original ids there.
        """
        chosen, groups = self._choose(ids, text, bounds, vocabulary, generator)
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
        self,
        ids: np.ndarray,
        text: np.ndarray,
        bounds: np.ndarray,
        vocabulary: Vocabulary,
        generator: np.random.Generator,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Selects text tokens of each sequence: its n-grams in a random order, until one of their words does not
        fit, so that the last n-gram may be shorter. Returns their indices in ``text`` and their n-grams."""
        words = self._words(ids, text, vocabulary)
        firsts = np.flatnonzero(np.diff(words, prepend=-1))  # the first token of each word
        grams = self._grams(text, firsts, generator)
        starts = np.searchsorted(text, bounds)  # of the sequences, in ``text``
        sequences = np.searchsorted(starts, firsts, side="right") - 1  # of the words
        keys = sequences + generator.random(len(firsts))[grams]
        order = np.argsort(keys, kind="stable" if self.ngram > 1 else None)
        sizes = np.diff(firsts, append=len(text))[order]
        room = self._counts(starts)[sequences]  # a sequence's words stay at the same places, in another order
        taken = np.empty(len(firsts), dtype=bool)
        taken[order] = np.cumsum(sizes) - starts[sequences] <= room
        chosen = np.flatnonzero(taken[words])
        return chosen, grams[words[chosen]]

    def _counts(self, starts: np.ndarray) -> np.ndarray:
        """How many tokens of each sequence are predicted: its fraction, rounded down or up so that the sum over the
        first sequences of the batch is always their fraction, rounded."""
        return np.diff(self._rounded(starts))

    def _rounded(self, tokens: int | np.ndarray) -> np.ndarray:
        result: np.ndarray = np.floor(self.probability * np.asarray(tokens) + 0.5).astype(np.int64)
        return result

    def _words(self, ids: np.ndarray, text: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
        """int64 [n], ascending from 0: the word of each text token, or with ``whole_word=False`` its number."""
        if not self.whole_word:
            return np.arange(len(text))
        words: np.ndarray = np.cumsum(vocabulary.starts_word[ids[text]] | _part_starts(text)) - 1
        return words

    def _grams(self, text: np.ndarray, firsts: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """int64 [words], ascending from 0: the n-gram of each word, whose first token is ``firsts`` in ``text``. The
        words are divided into n-grams of random lengths; an n-gram also ends where a text ends."""
        if self.ngram == 1 or not len(firsts):
            return np.arange(len(firsts))
        sizes = np.arange(1, self.ngram + 1)
        weights = np.cumsum(_SPAN_DECAY**sizes if self.spans else 1 / sizes)
        drawn = sizes[np.searchsorted(weights / weights[-1], generator.random(len(firsts)), side="right")]
        grams = np.searchsorted(np.cumsum(drawn), np.arange(len(firsts)), side="right")
        begins = _part_starts(text)[firsts]
        begins[1:] |= np.diff(grams) > 0
        result: np.ndarray = np.cumsum(begins) - 1
        return result


def _part_starts(text: np.ndarray) -> np.ndarray:
    """bool [n]: whether a text starts at this text token."""
    starts = np.ones(len(text), dtype=bool)
    starts[1:] = np.diff(text) > 1
    return starts
