"""TinyBERT's data augmentation (Jiao et al., 2020, algorithm 1): copies of a task's texts with some words replaced.

A word that is one token is masked, and a masked LM proposes others in its place; for a word of several tokens the words
with the nearest embeddings are proposed. Each word of a copy is replaced with a probability by a random proposal.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.lines import DataError
from fasttfm.data.task_files import TextExample
from fasttfm.data.tokenizer import Tokenizer
from fasttfm.inference.opening import base_of
from fasttfm.models.families import longest_input
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.nn import MaskedLMHead
from fasttfm.train.settings import at_least

_WORD = re.compile(r"[^\W\d_]+")


class Augmenter:
    """Makes copies of texts.

    Args:
        model: A masked LM.
        tokenizer: Its tokenizer.
        copies: The number of copies of each text, in addition to the text itself; 20 in the paper.
        candidates: The number of proposals for each word; 15 in the paper.
        probability: The probability that a word is replaced; 0.4 in the paper.
        seed: Random seed.
    """

    def __init__(
        self,
        model: PretrainedModel,
        tokenizer: Tokenizer,
        *,
        copies: int = 20,
        candidates: int = 15,
        probability: float = 0.4,
        seed: int = 0,
    ) -> None:
        at_least("copies", copies, 1)
        at_least("candidates", candidates, 1)
        if not 0 <= probability <= 1:
            raise ValueError(f"probability: expected a number in [0, 1], got {probability}")
        special = tokenizer.special
        if special.mask is None or special.cls is None or special.sep is None:
            raise DataError("augmentation: expected a tokenizer with tokens for mask, beginning and end, got none")
        self.model, self.tokenizer = model.eval(), tokenizer
        self.copies, self.candidates, self.probability = copies, candidates, probability
        self._random = random.Random(seed)
        self._frame = (special.cls, special.sep, special.mask)
        # The tokens that are whole words: the possible proposals.
        names = {id: tokenizer.decode([id]).strip() for id in np.flatnonzero(tokenizer.starts_word).tolist()}
        self._words = {id: name for id, name in names.items() if _WORD.fullmatch(name)}
        self._ids = torch.tensor(sorted(self._words), dtype=torch.int64, device="cpu")
        self._near: dict[str, list[str]] = {}

    def augmented(
        self,
        examples: Sequence[Any],
        watch: Callable[[Iterable[Any]], Iterable[Any]] = iter,
    ) -> list[Any]:
        """Each example, followed by its copies with the same label. Examples are texts or pairs of texts."""
        copies: list[Any] = []
        for example in watch(examples):
            if not isinstance(example, TextExample):
                raise DataError(f"augmentation: expected texts or pairs of texts, got {type(example).__name__}")
            copies.append(example)
            firsts = self.texts(example.first)
            seconds: Sequence[str | None] = [None] * self.copies
            if example.second is not None:
                seconds = self.texts(example.second)
            pairs = zip(firsts, seconds, strict=True)
            copies += [replace(example, first=first, second=second) for first, second in pairs]
        return copies

    def texts(self, text: str) -> list[str]:
        """The copies of a text."""
        words = [match.span() for match in _WORD.finditer(text)]
        proposals = self.proposals(text, words)
        copies = []
        for _ in range(self.copies):
            parts, end = [], 0
            for (start, stop), some in zip(words, proposals, strict=True):
                chosen = text[start:stop]
                if some and self._random.random() < self.probability:
                    chosen = self._random.choice(some)
                parts += [text[end:start], chosen]
                end = stop
            copies.append("".join([*parts, text[end:]]))
        return copies

    @torch.no_grad()
    def proposals(self, text: str, words: Sequence[tuple[int, int]]) -> list[list[str]]:
        """Other words that may replace each word, which is given by its first character and the one after its last."""
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        first, last, mask = self._frame
        room = longest_input(self.model.config) - 2
        tokens = [
            [index for index, (start, stop) in enumerate(offsets) if start < high and stop > low and stop > start]
            for low, high in words
        ]
        single = [number for number, indices in enumerate(tokens) if len(indices) == 1 and indices[0] < room]
        proposed: list[list[str]] = [[] for _ in words]
        if single:
            masked = [[first, *ids[:room], last] for _ in single]
            for row, number in zip(masked, single, strict=True):
                row[tokens[number][0] + 1] = mask
            for number, best in zip(single, self._likeliest(masked, mask), strict=True):
                proposed[number] = [self._words[id] for id in best]
        for number, (low, high) in enumerate(words):
            if len(tokens[number]) > 1:
                proposed[number] = self._nearest(text[low:high], [ids[index] for index in tokens[number]])
        return proposed

    def _likeliest(self, rows: list[list[int]], mask: int) -> list[list[int]]:
        """The most likely words for the mask of each row."""
        device = next(self.model.parameters()).device
        ids = torch.tensor(rows, device=device, dtype=torch.int64)
        encoded = base_of(self.model).encode(ids, lengths=[ids.shape[1]] * len(ids))
        head = self.model.get_submodule("lm_head")
        assert isinstance(head, MaskedLMHead)
        logits = head(encoded.x[(ids == mask).flatten()])[:, self._ids.to(device)]
        best = logits.topk(min(self.candidates, len(self._ids))).indices.cpu()
        return [self._ids[row].tolist() for row in best]

    def _nearest(self, word: str, ids: list[int]) -> list[str]:
        """The words whose embeddings have the largest cosine similarity with the mean embedding of a word's tokens."""
        if word not in self._near:
            table: Tensor = base_of(self.model).embeddings.word.weight
            mean = table[torch.tensor(ids, device=table.device, dtype=torch.int64)].mean(0)
            scores = torch.cosine_similarity(table[self._ids.to(table.device)], mean[None]).cpu()
            best = scores.topk(min(self.candidates, len(self._ids))).indices
            self._near[word] = [self._words[id] for id in self._ids[best].tolist()]
        return self._near[word]
