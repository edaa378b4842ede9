"""Predictions of language models: tokens for masks, and likelihoods of texts and continuations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.data.lines import DataError
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.data.tokenizer_files import load_tokenizer
from fasttfm.inference.opening import checkpoint_of, family_of, open_model
from fasttfm.models.families import longest_input
from fasttfm.models.family import Family, Head
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.tasks.distillation_recipes import encode
from fasttfm.tasks.finetuning import format_of
from fasttfm.tasks.inputs import Feature, Tokens, by_budget, collate
from fasttfm.train.distributed import device_named
from fasttfm.train.settings import at_least

_ROWS = 256  # rows of logits in memory at a time


class Guess(NamedTuple):
    """A token for a mask."""

    token: str  # its entry in the vocabulary
    text: str  # decoded
    probability: float


@dataclass(frozen=True)
class TextScore:
    """The log-likelihood of a text, or its pseudo-log-likelihood for a masked LM (Salazar et al., 2020)."""

    tokens: int  # the number of tokens that are predicted
    log_likelihood: float  # natural logarithm, the sum over these tokens

    @property
    def perplexity(self) -> float | None:
        """None if no token is predicted."""
        if self.tokens == 0:
            return None
        mean = -self.log_likelihood / self.tokens
        return math.exp(mean) if mean < 700 else math.inf


class LanguageModel:
    """A masked or causal LM with its tokenizer, on the model's device.

    Args:
        tokens_per_batch: The maximum number of tokens in a batch; a longer sequence is a batch by itself.
        precision: ``"float32"``, or ``"bfloat16"`` for autocast.
    """

    def __init__(
        self,
        model: PretrainedModel,
        tokenizer: Tokenizer,
        family: Family,
        *,
        tokens_per_batch: int = 8192,
        precision: str = "float32",
    ) -> None:
        at_least("tokens_per_batch", tokens_per_batch, 1)
        self.model, self.tokenizer, self.causal = model.eval(), tokenizer, family.causal
        self.tokens_per_batch, self.precision = tokens_per_batch, precision
        self.longest = longest_input(model.config)
        self.truncated = 0  # the number of truncated texts
        self._form = None if family.causal else format_of(family, model.config, tokenizer, self.longest)
        self._device = next(model.parameters()).device

    # ---- masks -------------------------------------------------------------------------------------------------------

    @property
    def mask(self) -> str:
        """The mask token."""
        if self.causal or self.tokenizer.special.mask is None:
            raise ValueError("fill-mask: expected a masked language model with a mask token, got one without")
        return self.tokenizer.token(self.tokenizer.special.mask)

    def fill_mask(self, texts: Iterable[str], top_k: int = 5) -> Iterator[list[list[Guess]]]:
        """Yields for each text the most likely tokens for each mask, the most likely first; texts are read lazily."""
        if not 1 <= top_k <= self.tokenizer.vocab_size:
            raise ValueError(f"top_k: expected 1 to the vocabulary's {self.tokenizer.vocab_size}, got {top_k}")
        mask = self.mask
        for group in by_budget(self._masked(texts, mask), self.tokens_per_batch):
            starts = itertools.accumulate((feature.tokens for feature in group), initial=0)
            positions = [
                start + position for feature, start in zip(group, starts, strict=False) for position in feature.target
            ]
            states = self._states(group)
            guesses: list[list[Guess]] = []
            for rows in torch.tensor(positions, device=self._device, dtype=torch.int64).split(_ROWS):
                with torch.inference_mode():
                    best = self._head(states.index_select(0, rows)).float().softmax(-1).topk(top_k)
                for values, ids in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                    guesses.append([self._guess(id, value) for id, value in zip(ids, values, strict=True)])
            rest = iter(guesses)
            yield from ([next(rest) for _ in feature.target] for feature in group)

    def _guess(self, id: int, probability: float) -> Guess:
        return Guess(self.tokenizer.token(id), self.tokenizer.decode([id]).strip(), probability)

    def _masked(self, texts: Iterable[str], mask: str) -> Iterator[Feature]:
        """Features with the positions of their masks."""
        assert self._form is not None
        for number, text in enumerate(texts, 1):
            tokens = self._form.one(self.tokenizer.encode(text))
            positions = [index for index, id in enumerate(tokens.ids) if id == self.tokenizer.special.mask]
            if not positions:
                got = f"none in its first {self.longest} tokens" if tokens.cut else f"{text[:60]!r}"
                raise DataError(f"text {number}: expected {mask} where a word is missing, got {got}")
            self.truncated += tokens.cut > 0
            yield Feature(number - 1, [tokens], positions)

    def sequence(self, ids: Sequence[int]) -> tuple[Tokens, int]:
        """The sequence of a text's ids as a masked LM reads it, and the position of the first; long ones are truncated
        and counted."""
        assert self._form is not None
        tokens = self._form.one(ids)
        self.truncated += tokens.cut > 0
        return tokens, len(self._form.first)

    def best_at(self, features: Sequence[tuple[Feature, Sequence[int]]]) -> list[int]:
        """The most likely token at these positions of each feature, one after the other."""
        return self.picked_at(features, lambda logits: logits.argmax(-1))

    def picked_at(
        self, features: Sequence[tuple[Feature, Sequence[int]]], pick: Callable[[Tensor], Tensor]
    ) -> list[int]:
        """The tokens that ``pick`` chooses of the logits [positions, vocabulary] at these positions of each feature."""
        starts = itertools.accumulate((feature.tokens for feature, _ in features), initial=0)
        rows = [start + at for (_, positions), start in zip(features, starts, strict=False) for at in positions]
        states = self._states([feature for feature, _ in features])
        tokens: list[int] = []
        for part in torch.tensor(rows, device=self._device, dtype=torch.int64).split(_ROWS):
            with torch.inference_mode():
                tokens += pick(self._head(states.index_select(0, part)).float()).tolist()
        return tokens

    # ---- likelihoods -------------------------------------------------------------------------------------------------

    def score(self, texts: Iterable[str | tuple[str, str]], *, stride: int | None = None) -> Iterator[TextScore]:
        """Yields the likelihood of each text, or, for a tuple of two texts, of the second after the first.

        A causal model predicts every token but the first from the previous ones. Texts longer than the model's
        positions are read in windows that start ``stride`` tokens apart (by default half of the positions), and each
        token is predicted once. A masked LM predicts every token from all others of the text, one at a time; longer
        texts are truncated to its positions.
        """
        if stride is not None and not 1 <= stride < self.longest:
            raise ValueError(f"stride: expected 1 to {self.longest - 1}, got {stride}")
        make = self._windows if self.causal else self._pseudo
        features = (feature for number, text in enumerate(texts) for feature in make(number, text, stride))
        total, tokens = 0.0, 0
        for group in by_budget(features, self.tokens_per_batch):
            for feature, losses in zip(group, self._losses(group), strict=True):
                total -= sum(losses)
                tokens += len(losses)
                if feature.target.last:
                    yield TextScore(tokens, total)
                    total, tokens = 0.0, 0

    def _encoded(self, text: str | tuple[str, str]) -> tuple[list[int], int]:
        """The ids of a text with its continuation, and the position where the continuation starts: the first token that
        differs from those of the text by itself."""
        if isinstance(text, str):
            return self.tokenizer.encode(text), 0
        before, whole = (self.tokenizer.encode(part) for part in (text[0], text[0] + text[1]))
        pairs = zip(before, whole, strict=False)
        begin = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(before), len(whole)))
        return whole, begin

    def _windows(self, number: int, text: str | tuple[str, str], stride: int | None) -> Iterator[Feature]:
        ids, begin = self._encoded(text)
        step = max(1, self.longest // 2) if stride is None else stride
        done = max(1, begin)  # the first token is not predicted
        for start in itertools.count(0, step):
            end = min(len(ids), start + self.longest)
            targets = [(position - start - 1, ids[position]) for position in range(max(done, start + 1), end)]
            done = max(done, end)
            last = end == len(ids)
            if targets or last:
                yield Feature(number, [Tokens(ids[start:end], [0] * (end - start))], Targets(targets, last))
            if last:
                return

    def _pseudo(self, number: int, text: str | tuple[str, str], stride: int | None) -> Iterator[Feature]:
        """Yields a sequence for each token, in which that token is masked."""
        assert self._form is not None
        mask = self.tokenizer.special.mask
        if mask is None:
            raise ValueError("score: expected a model with a mask token, got one without")
        ids, begin = self._encoded(text)
        tokens = self._form.one(ids)
        self.truncated += tokens.cut > 0
        first = len(self._form.first)
        positions = range(first + begin, len(tokens.ids) - len(self._form.last))
        if not positions:
            yield Feature(number, [tokens], Targets([], True))
        for position in positions:
            masked = [*tokens.ids[:position], mask, *tokens.ids[position + 1 :]]
            targets = Targets([(position, tokens.ids[position])], position == positions[-1])
            yield Feature(number, [Tokens(masked, tokens.segments)], targets)

    def _losses(self, group: Sequence[Feature]) -> list[list[float]]:
        """The negative log-likelihood of each target of each feature."""
        needed = [feature for feature in group if feature.target.pairs]
        starts = itertools.accumulate((feature.tokens for feature in needed), initial=0)
        pairs = [
            (start + position, id)
            for feature, start in zip(needed, starts, strict=False)
            for position, id in feature.target.pairs
        ]
        losses: list[float] = []
        if pairs:
            states = self._states(needed)
            for part in torch.tensor(pairs, device=self._device, dtype=torch.int64).split(_ROWS):
                with torch.inference_mode():
                    logits = self._head(states.index_select(0, part[:, 0])).float()
                    losses += torch.nn.functional.cross_entropy(logits, part[:, 1], reduction="none").tolist()
        rest = iter(losses)
        return [[next(rest) for _ in feature.target.pairs] for feature in group]

    def _states(self, group: Sequence[Feature]) -> Tensor:
        """[T, C]"""
        segments = self._form is not None and self._form.segments
        batch = collate(group, segments=segments).to(self._device)
        enabled = self.precision == "bfloat16"
        with torch.inference_mode(), torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=enabled):
            return encode(self.model, batch).x

    def _head(self, states: Tensor) -> Tensor:
        head: Any = self.model.get_submodule("lm_head")
        enabled = self.precision == "bfloat16"
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=enabled):
            logits: Tensor = head(states)
        return logits


class Targets(NamedTuple):
    """Positions of a sequence with the token that each predicts, and whether the text ends with this sequence."""

    pairs: list[tuple[int, int]]
    last: bool


def load_language_model(
    directory: str | Path,
    *,
    masked: bool = False,
    tokenizer: str | Path | None = None,
    device: str | torch.device | None = None,
    precision: str | None = None,
    tokens_per_batch: int = 8192,
) -> LanguageModel:
    """Opens the language model of a directory, or the newest checkpoint of a pre-training run.

    Args:
        masked: Whether it must be a masked LM; otherwise a causal LM is opened too.
        tokenizer: The directory or file of the tokenizer, if it is not in ``directory``.
        device: By default a GPU if there is one.
        precision: By default ``"bfloat16"`` on a GPU and ``"float32"`` on a CPU.
    """
    path = checkpoint_of(directory, Head.MASKED_LM)
    family = family_of(path)
    head = Head.CAUSAL_LM if family.causal and not masked else Head.MASKED_LM
    text_tokenizer = load_tokenizer(path if tokenizer is None else tokenizer)
    where = device if isinstance(device, torch.device) else device_named(device)
    model = open_model(path, head, trained=True, dtype=torch.float32).to(where)
    default = "bfloat16" if where.type == "cuda" else "float32"
    return LanguageModel(
        model, text_tokenizer, family, tokens_per_batch=tokens_per_batch, precision=precision or default
    )
