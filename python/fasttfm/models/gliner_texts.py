"""Texts and types of entities as GLiNER's tokens, and entities in its probabilities.

    [CLS] <<ENT>> type 1 <<ENT>> type 2 <<SEP>> word 1 word 2 ... [SEP]

A word is a run of letters and digits, with hyphens inside, or another single character.
"""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasttfm import _extras
from fasttfm._atomic_files import atomic_writes, json_text
from fasttfm.models.checkpoint_files import CheckpointError, read_json
from fasttfm.models.gliner_config import GLiNERConfig

_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")
_FILE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_NO_LIMIT = 10**6  # tokenizers without a limit state a larger one


class Word(NamedTuple):
    """A word and the range of its characters in a text."""

    text: str
    start: int
    end: int


class TextTokens(NamedTuple):
    """The tokens of a text with its types."""

    ids: list[int]
    words: list[int]  # at the first token of each word its number, from 1 on; otherwise 0


def words_of(text: str) -> list[Word]:
    """The words of a text."""
    return [Word(match.group(), *match.span()) for match in _WORD.finditer(text)]


def packed(read: Sequence[TextTokens], device: torch.device) -> dict[str, Any]:
    """The arguments of a call of the model for texts with their types, without padding."""
    lengths = [len(text.ids) for text in read]
    columns = [[number for text in read for number in text[column]] for column in (0, 1)]
    ids, words = (torch.tensor(column, dtype=torch.int64, device=device) for column in columns)
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    return {"input_ids": ids, "words_mask": words, "cu_seqlens": ends, "max_seqlen": max(lengths)}


def targets(
    read: Sequence[TextTokens],
    types: Sequence[Sequence[str]],
    entities: Sequence[Sequence[tuple[int, int, str]]],
    max_width: int,
) -> Tensor:
    """fp32 [texts, words, widths, types]: 1 for the entities of each text, otherwise 0. Entities that are longer than
    ``max_width``, or not in the text or its types, are left out."""
    words = [max(text.words) for text in read]
    labels = np.zeros((len(words), max(words), max_width, max(map(len, types))), np.float32)
    for number, found in enumerate(entities):
        for first, last, label in found:
            if 0 <= first <= last < min(first + max_width, words[number]) and label in types[number]:
                labels[number, first, last - first, types[number].index(label)] = 1
    return torch.from_numpy(labels)


def unique(labels: Sequence[str]) -> list[str]:
    """The types of entities, each once."""
    if isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        got = repr(labels) if isinstance(labels, str) else next(repr(x) for x in labels if not isinstance(x, str))
        raise TypeError(f"GLiNER: labels: expected a list of texts, got {got}")
    return list(dict.fromkeys(labels))


class EntityTokenizer:
    """A ``tokenizers.Tokenizer`` with the markers of types and of the text's start.

    Args:
        backend: The tokenizer, to which missing markers are added.
        max_tokens: The maximum number of tokens of a sequence; None for any.
    """

    def __init__(self, backend: Any, config: GLiNERConfig, max_tokens: int | None = None) -> None:
        self.backend, self.config, self.max_tokens = backend, config, max_tokens
        backend.no_padding()
        backend.no_truncation()
        markers = ["[FLERT]", config.ent_token, config.sep_token]  # in the order of published checkpoints
        if -1 in (config.class_token_index, config.vocab_size):
            backend.add_special_tokens([marker for marker in markers if backend.token_to_id(marker) is None])
        self.marker = backend.token_to_id(config.ent_token)
        if self.marker is None or config.class_token_index not in (-1, self.marker):
            expected = f"{config.ent_token!r} with the id class_token_index ({config.class_token_index})"
            raise CheckpointError(f"GLiNER: tokenizer: expected {expected}, got {self.marker}")
        plain, ids = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
        first = next(start for start in range(len(ids)) if ids[start : start + len(plain)] == plain)
        self.first, self.last = ids[:first], ids[first + len(plain) :]

    @classmethod
    def of(cls, given: Any, config: GLiNERConfig) -> EntityTokenizer:
        """The given tokenizer, of fasttfm or the tokenizers library, or a copy of it with the markers."""
        if isinstance(given, EntityTokenizer):
            return given
        return cls(_library().from_str(getattr(given, "backend", given).to_str()), config)

    @classmethod
    def of_directory(cls, directory: Path, config: GLiNERConfig) -> EntityTokenizer | None:
        """The tokenizer of a directory; None without a ``tokenizer.json``."""
        if not (directory / _FILE).is_file():
            return None
        settings = read_json(directory / _SETTINGS) if (directory / _SETTINGS).is_file() else {}
        limit = settings.get("model_max_length")
        limit = limit if isinstance(limit, int) and limit < _NO_LIMIT else None
        return cls(_library().from_file(str(directory / _FILE)), config, limit)

    def save(self, directory: Path) -> None:
        """Writes the files that ``of`` and transformers read."""
        names = {f"{role}_token": name for role, name in _SPECIAL.items() if self.backend.token_to_id(name) is not None}
        limit = {} if self.max_tokens is None else {"model_max_length": self.max_tokens}
        rules = json.dumps(json.loads(self.backend.to_str()), indent=2, ensure_ascii=False)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **limit}
        with atomic_writes([directory / _FILE, directory / _SETTINGS]) as partials:
            partials[directory / _FILE].write_text(rules, encoding="utf-8")
            partials[directory / _SETTINGS].write_text(json_text({**settings, **names}), encoding="utf-8")

    def prompt(self, labels: Sequence[str]) -> list[int]:
        """The tokens of types and of the end of the prompt."""
        words = [part for label in labels for part in (self.config.ent_token, label) if part]
        ids: list[int] = self._encode([[*words, self.config.sep_token]])[0].ids
        return ids

    def sequences(self, texts: Sequence[Sequence[str]], prompts: Sequence[list[int]]) -> list[TextTokens]:
        """The tokens of texts, given by their words, after their prompts. A text that does not fit is truncated to its
        first words, with a warning."""
        found, cut = [], []
        for words, prompt, encoding in zip(texts, prompts, self._encode([list(words) for words in texts]), strict=True):
            numbers = np.array([-1 if word is None else word for word in encoding.word_ids], dtype=np.int64)
            room = len(numbers)
            if self.max_tokens is not None:
                room = self.max_tokens - len(self.first) - len(prompt) - len(self.last)
                if room < 1 <= len(numbers):
                    got = f"{len(self.first) + len(prompt) + len(self.last)} tokens without a text"
                    raise ValueError(f"GLiNER: labels: expected less than {self.max_tokens} tokens, got {got}")
            kept = int(((numbers[:room]) < self.config.max_len).sum())
            cut += [(len(words), int(numbers[:kept].max(initial=-1)) + 1)] if kept < len(numbers) else []
            marks = np.where(np.diff(numbers[:kept], prepend=-1) != 0, numbers[:kept] + 1, 0).tolist()
            before, after = len(self.first) + len(prompt), len(self.last)
            ids = [*self.first, *prompt, *encoding.ids[:kept], *self.last]
            found.append(TextTokens(ids, [0] * before + marks + [0] * after))
        if cut:
            (before, left), *more = cut
            others = f"; so are {len(more)} others" if more else ""
            warnings.warn(f"GLiNER: a text of {before} words is truncated to its first {left}{others}", stacklevel=4)
        return found

    def _encode(self, texts: list[list[str]]) -> list[Any]:
        encodings: list[Any] = self.backend.encode_batch(texts, is_pretokenized=True, add_special_tokens=False)
        return encodings


def entities_in(
    probabilities: np.ndarray, threshold: float, *, flat: bool = True, multi_label: bool = False
) -> list[tuple[int, int, int, float]]:
    """The first and last word, the type and the probability of each entity, by their first words.

    The most probable span above the threshold is an entity, then the next that does not conflict with the previous
    ones: with ``flat`` it has no word of theirs, otherwise it is inside of them, around them or apart from them. A span
    has one type; several with ``multi_label``.

    Args:
        probabilities: [words, widths, types], 0 for spans that end after the text.
    """
    starts, widths, types = np.nonzero(probabilities > threshold)
    values = probabilities[starts, widths, types]
    order = np.argsort(-values, kind="stable")
    starts, ends, types, values = starts[order], (starts + widths)[order], types[order], values[order]
    kept: list[int] = []
    left = np.ones(len(starts), dtype=bool)  # the candidates without a conflict
    position = 0
    while (rest := np.flatnonzero(left[position:])).size:
        chosen = position + int(rest[0])
        kept.append(chosen)
        start, end = starts[chosen], ends[chosen]
        same = (starts == start) & (ends == end)
        conflict = (starts <= end) & (ends >= start)
        if not flat:
            nested = ((starts <= start) & (ends >= end)) | ((starts >= start) & (ends <= end))
            conflict &= ~nested
        left &= ~np.where(same, not multi_label, conflict)
        left[chosen] = False
        position = chosen + 1
    kept.sort(key=lambda index: int(starts[index]))
    return [(int(starts[i]), int(ends[i]), int(types[i]), float(values[i])) for i in kept]


def _library() -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise _extras.missing("reading texts", "tokenizers", "train") from None
    return Tokenizer
