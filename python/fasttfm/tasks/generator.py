"""ELECTRA's generator as it is used in pre-training: it replaces random tokens of texts by its own samples."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fasttfm.data.lines import DataError
from fasttfm.tasks.inputs import Feature
from fasttfm.tasks.language_models import LanguageModel
from fasttfm.tasks.pretraining_heads import ReplacedExample


def replaced_by_generator(
    generator: LanguageModel, examples: Iterable[ReplacedExample], rate: float, *, seed: int = 0
) -> Iterator[ReplacedExample]:
    """Yields the texts of the examples with some tokens replaced: a fraction ``rate``, at least one, is masked and
    sampled by the generator. As in pre-training, a sample that equals the original token does not count as replaced."""
    if not 0 < rate <= 1:
        raise ValueError(f"rate: expected a number above 0 and up to 1, got {rate}")
    tokenizer, mask = generator.tokenizer, generator.tokenizer.special.mask
    if mask is None:
        raise ValueError("rate: expected a generator with a mask token, got one without")
    for number, example in enumerate(examples, 1):
        ids, spans = tokenizer.encode_with_offsets(example.text)
        sequence, first = generator.sequence(ids)
        count = len(ids) - sequence.cut
        if count < 1:
            raise DataError(f"text {number}: expected words, got an empty text")
        chosen = sorted(random.Random(f"{seed} {number}").sample(range(count), max(1, round(rate * count))))
        positions = [first + index for index in chosen]
        masked = [mask if place in positions else id for place, id in enumerate(sequence.ids)]
        noise = torch.Generator("cpu").manual_seed((seed * 1_000_003 + number) % 2**63)

        def sample(logits: Tensor, noise: torch.Generator = noise) -> Tensor:
            return torch.multinomial(logits.softmax(-1).cpu(), 1, generator=noise).squeeze(-1)

        sampled = generator.picked_at([(Feature(0, [sequence._replace(ids=masked)]), positions)], sample)
        changed = list(ids)
        for index, id in zip(chosen, sampled, strict=True):
            changed[index] = id
        text, places = _with_tokens(generator, example.text, ids, changed, spans)
        replaced = [id != original for id, original in zip(changed, ids, strict=True)]
        yield ReplacedExample(text, replaced, example.text, changed, places)


def _with_tokens(
    generator: LanguageModel, text: str, ids: list[int], changed: list[int], spans: list[tuple[int, int]]
) -> tuple[str, list[tuple[int, int]]]:
    """The text with other tokens in the places of some, and the characters of all tokens in it."""
    parts: list[str] = []
    places: list[tuple[int, int]] = []
    done = size = 0
    for id, other, (begin, end) in zip(ids, changed, spans, strict=True):
        begin = max(done, end - len(text[begin:end].lstrip()))  # a token may start with the space before its word
        token = text[begin:end]
        if other != id:
            token = generator.tokenizer.decode([other]).strip() or generator.tokenizer.token(other)
        parts += [text[done:begin], token]
        start = size + begin - done
        size = start + len(token)
        places.append((start, size))
        done = max(done, end)
    return "".join([*parts, text[done:]]), places
