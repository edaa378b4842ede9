"""The predictions of a masked LM for the same texts, masked at several rates."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fasttfm.data.lines import DataError
from fasttfm.tasks.inputs import Feature, by_budget
from fasttfm.tasks.language_models import LanguageModel


class MaskedText(NamedTuple):
    """A text that is masked at a rate, and what a model predicts for its masks."""

    rate: float
    masked: str
    filled: str  # predictions in brackets, those that are wrong with the right token
    tokens: int  # the number of masked tokens
    right: int  # how many of them are predicted


def fill_at_rates(
    model: LanguageModel, texts: Iterable[str], rates: Sequence[float], *, seed: int = 0
) -> Iterator[list[MaskedText]]:
    """Yields each text at each rate. The masked tokens are drawn by the seed and the text's number; those of a rate are
    masked at all higher rates too. At least one token is masked."""
    for rate in rates:
        if not 0 < rate <= 1:
            raise ValueError(f"rates: expected numbers above 0 and up to 1, got {rate}")
    features = _features(model, texts, rates, seed)
    masked: list[MaskedText] = []
    for group in by_budget(features, model.tokens_per_batch):
        predicted = iter(model.best_at([(feature, feature.target.positions) for feature in group]))
        for feature in group:
            masked.append(
                feature.target.filled(model, list(itertools.islice(predicted, len(feature.target.positions))))
            )
            if len(masked) == len(rates):
                yield masked
                masked = []


class _Masked(NamedTuple):
    """The target of a feature: its text and the tokens of it that are masked."""

    text: str
    rate: float
    spans: list[tuple[int, int]]  # the characters of the text's tokens
    ids: list[int]  # of the text's tokens
    chosen: list[int]  # the masked ones, ascending
    positions: list[int]  # of these in the sequence

    def filled(self, model: LanguageModel, best: Sequence[int]) -> MaskedText:
        right = sum(self.ids[index] == id for index, id in zip(self.chosen, best, strict=True))
        shown = []
        for index, id in zip(self.chosen, best, strict=True):
            begin, end = self.spans[index]
            guess = model.tokenizer.decode([id]).strip() or model.tokenizer.token(id)
            original = self.text[begin:end].strip()
            shown.append(f"[{guess}]" if id == self.ids[index] else f"[{guess}, not {original}]")
        masks = [model.mask] * len(self.chosen)
        return MaskedText(self.rate, self._with(masks), self._with(shown), len(self.chosen), right)

    def _with(self, replacements: Sequence[str]) -> str:
        """The text with the chosen tokens replaced."""
        parts, done = [], 0
        for index, replacement in zip(self.chosen, replacements, strict=True):
            begin, end = self.spans[index]
            begin = end - len(self.text[begin:end].lstrip())  # a token may start with the space before its word
            parts += [self.text[done : max(done, begin)], replacement]
            done = max(done, end)
        return "".join([*parts, self.text[done:]])


def _features(model: LanguageModel, texts: Iterable[str], rates: Sequence[float], seed: int) -> Iterator[Feature]:
    mask = model.tokenizer.special.mask
    name = model.mask  # raises if the model has none
    assert mask is not None
    for number, text in enumerate(texts, 1):
        ids, spans = model.tokenizer.encode_with_offsets(text)
        sequence, first = model.sequence(ids)
        count = len(ids) - sequence.cut
        if mask in ids or count < 1:
            got = "an empty text" if count < 1 else f"{text:.60}"
            raise DataError(f"text {number}: expected words and no {name}, which --rates puts in, got {got}")
        order = random.Random(f"{seed} {number}").sample(range(count), count)
        for rate in rates:
            chosen = sorted(order[: max(1, round(rate * count))])
            positions = [first + index for index in chosen]
            masked = list(sequence.ids)
            for position in positions:
                masked[position] = mask
            target = _Masked(text, rate, spans, ids, chosen, positions)
            yield Feature(number - 1, [sequence._replace(ids=masked)], target)


def accuracy_by_rate(texts: Iterable[Sequence[MaskedText]]) -> list[dict[str, float | int]]:
    """For each rate the numbers of masked tokens and of right predictions, over all texts."""
    rows: dict[float, dict[str, float | int]] = {}
    for text in itertools.chain.from_iterable(texts):
        row = rows.setdefault(text.rate, {"rate": text.rate, "tokens": 0, "right": 0})
        row["tokens"] += text.tokens
        row["right"] += text.right
    return [{**row, "accuracy": row["right"] / row["tokens"]} for row in rows.values()]
