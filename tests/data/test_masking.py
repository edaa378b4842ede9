"""Masking: fractions, words and n-grams, counted over many tokens and compared within four standard deviations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttfm.data.masking import Masking, Vocabulary

MASK, FIRST, SIZE = 4, 5, 1000
VOCABULARY = Vocabulary(MASK, np.arange(FIRST, SIZE), np.arange(SIZE) % 4 != 3)  # every fourth token continues a word


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


def sequences(lengths: list[int], seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids of sequences with a special token before and after each, the positions of the other tokens, and the
    sequences' bounds."""
    parts = [np.concatenate([[2], generator(seed + i).integers(FIRST, SIZE, n), [3]]) for i, n in enumerate(lengths)]
    ids = np.concatenate(parts)
    return ids, np.flatnonzero(ids >= FIRST), np.cumsum([0, *map(len, parts)])


def apply(masking: Masking, lengths: list[int], seed: int = 0) -> tuple[np.ndarray, ...]:
    """Ids before and after masking, the positions of texts, the predicted positions, and their labels."""
    before, text, bounds = sequences(lengths)
    after = before.copy()
    positions, labels = masking.apply(after, text, bounds, VOCABULARY, generator(seed))
    return before, after, text, positions, labels


def close(chosen: int, count: int, share: float) -> bool:
    return abs(chosen - share * count) <= 4 * math.sqrt(count * share * (1 - share))


@pytest.mark.parametrize(
    "masking", [Masking(), Masking(whole_word=True), Masking(ngram=3), Masking(whole_word=True, ngram=3)], ids=str
)
def test_fractions(masking: Masking) -> None:
    before, after, text, positions, labels = apply(masking, [500] * 400)
    # A word that does not fit ends a sequence's predictions; few words have more than two tokens.
    assert (0.148 if masking.whole_word else 0.15) * len(text) <= len(positions) <= round(0.15 * len(text))
    assert np.all(np.diff(positions) > 0)
    assert np.array_equal(labels, before[positions])
    others = np.setdiff1d(np.arange(len(before)), positions)
    assert np.array_equal(before[others], after[others])
    assert np.all(before[positions] >= FIRST)  # special tokens are never predicted
    now = after[positions]
    masked, same = now == MASK, now == labels
    assert close(int(masked.sum()), len(positions), 0.8)
    # A random token is the old one in one of SIZE - FIRST cases.
    assert close(int(same.sum()), len(positions), 0.1 + 0.1 / (SIZE - FIRST))
    random = now[~masked & ~same]
    assert random.min() >= FIRST
    assert close(int((random < SIZE // 2).sum()), len(random), (SIZE // 2 - FIRST) / (SIZE - FIRST))


def test_other_fractions() -> None:
    _, after, _, positions, labels = apply(Masking(0.4, mask_share=0.5, random_share=0.5), [500] * 100)
    assert close(int((after[positions] == MASK).sum()), len(positions), 0.5)
    assert close(int((after[positions] == labels).sum()), len(positions), 0.5 / (SIZE - FIRST))


def test_every_position_is_equally_likely() -> None:
    counts = np.zeros(52)
    for seed in range(2000):
        _, _, _, positions, _ = apply(Masking(0.2), [50], seed)
        counts[positions] += 1
    assert counts[0] == counts[-1] == 0
    assert np.all(np.abs(counts[1:-1] - 400) < 4.5 * math.sqrt(2000 * 0.2 * 0.8))


def words_of(ids: np.ndarray, text: np.ndarray) -> np.ndarray:
    """The index of each token's word, computed token by token."""
    word, words = -1, []
    for i, position in enumerate(text):
        if i == 0 or text[i - 1] != position - 1 or VOCABULARY.starts_word[ids[position]]:
            word += 1
        words.append(word)
    return np.array(words)


def test_whole_words() -> None:
    before, _, text, positions, _ = apply(Masking(whole_word=True), [60] * 200)
    words, predicted = words_of(before, text), np.isin(text, positions)
    by_word = np.bincount(words, predicted) / np.bincount(words)
    assert set(by_word.tolist()) == {0.0, 1.0}
    assert np.array_equal(Masking(whole_word=True)._words(before, text, VOCABULARY), words)
    assert (np.bincount(words)[by_word == 1] > 1).any()


@pytest.mark.parametrize("whole_word", [False, True])
def test_ngrams(whole_word: bool) -> None:
    """Few predictions, so that n-grams are rarely adjacent: their lengths are in proportion to 1, 1/2, 1/3."""
    before, _, text, positions, _ = apply(Masking(0.01, whole_word=whole_word, ngram=3), [100_000] * 3)
    words = words_of(before, text) if whole_word else np.arange(len(text))
    chosen = np.unique(words[np.isin(text, positions)])
    runs = np.diff(np.flatnonzero(np.concatenate([[True], np.diff(chosen) > 1, [True]])))
    shares = np.array([(runs == n).mean() for n in (1, 2, 3)])
    assert np.abs(shares - np.array([6, 3, 2]) / 11).max() < 0.05
    if whole_word:
        predicted = np.bincount(words, np.isin(text, positions))
        assert np.isin(predicted[predicted > 0] / np.bincount(words)[predicted > 0], [1.0]).all()


def test_ngrams_end_with_their_sequence() -> None:
    """Sequences of two tokens, n-grams of up to eight: a group has at most two tokens."""
    _, text, _ = sequences([2] * 500)
    groups = Masking(ngram=8)._grams(text, np.arange(len(text)), generator())
    assert np.bincount(groups).max() == 2
    assert np.all(groups[1::2] < np.append(groups[2::2], groups[-1] + 1))


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=8),
    st.floats(0, 1),
    st.booleans(),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
def test_any_lengths(lengths: list[int], probability: float, whole_word: bool, ngram: int, seed: int) -> None:
    masking = Masking(probability, whole_word=whole_word, ngram=ngram)
    before, after, text, positions, labels = apply(masking, lengths, seed)
    assert len(positions) <= masking.most(len(text))
    assert np.isin(positions, text).all()
    after[positions] = labels
    assert np.array_equal(before, after)


def test_the_same_generator_gives_the_same_masks() -> None:
    first, again, other = (apply(Masking(), [500], seed) for seed in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[3], other[3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probability": 1.5}, r"Masking: probability: expected a number in \[0, 1\], got 1.5"),
        ({"mask_share": 0.9, "random_share": 0.2}, "at most 1, got 0.9 \\+ 0.2"),
        ({"ngram": 0}, "ngram: expected 1 or more, got 0"),
    ],
)
def test_bad_settings(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Masking(**options)  # type: ignore[arg-type]


def test_spans_are_replaced_as_a_whole() -> None:
    """As in SpanBERT: lengths in proportion to 0.8^n up to the maximum, and one kind of replacement per span."""
    _, after, text, positions, labels = apply(Masking(ngram=10, spans=True), [500] * 400)
    assert len(positions) == round(0.15 * len(text))  # the last span of a sequence may be shorter
    kinds = np.where(after[positions] == MASK, 0, np.where(after[positions] == labels, 2, 1))
    gaps = np.diff(positions) > 1
    same = kinds[1:] == kinds[:-1]
    # Neighbours are of one span, or of two that touch, which is rare and then of equal kinds in 0.66 of the cases.
    assert same[~gaps].mean() > 0.9
    assert close(int(same[gaps].sum()), int(gaps.sum()), 0.8**2 + 2 * 0.1**2)
    weights = 0.8 ** np.arange(1, 11)
    mean = (weights * np.arange(1, 11)).sum() / weights.sum()
    runs = np.diff(np.flatnonzero(np.concatenate([[True], gaps, [True]])))
    assert mean == pytest.approx(3.8, abs=0.05)
    # A run is a span, or a few that touch: with 15% of the tokens in spans, the next token begins another in 4%.
    assert 0.95 * mean < runs.mean() < 1.3 * mean


def test_every_sequence_has_its_fraction_of_predictions() -> None:
    """15% of each sequence, rounded down or up, and the sum over the batch rounded once: its size is known before."""
    lengths = [500, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 126, 300] * 20
    _, _, text, positions, _ = apply(Masking(), lengths)
    ends = np.cumsum(np.array(lengths) + 2)
    counts = np.diff(np.searchsorted(positions, np.append(0, ends)))
    assert np.abs(counts - 0.15 * np.array(lengths)).max() < 1 + 1e-9
    assert counts.sum() == len(positions) == Masking().most(len(text))
    # A short sequence has a prediction in as many cases as its length asks for.
    assert close(int(counts[np.array(lengths) == 2].sum()), 20, 0.3)


@pytest.mark.parametrize("options", [{"whole_word": True}, {"ngram": 10, "spans": True, "whole_word": True}], ids=str)
def test_words_and_spans_stay_within_the_fraction_of_their_sequence(options: dict[str, Any]) -> None:
    lengths = [126] * 100 + [30] * 100
    before, _, text, positions, _ = apply(Masking(**options), lengths)
    ends = np.append(0, np.cumsum(np.array(lengths) + 2))
    counts = np.diff(np.searchsorted(positions, ends))
    assert (counts <= np.ceil(0.15 * np.array(lengths))).all()
    # What is missing is less than one word.
    longest = np.bincount(words_of(before, text)).max()
    assert (counts > np.floor(0.15 * np.array(lengths)) - longest).all()
    assert counts[:100].mean() > 0.95 * 0.15 * 126
