"""``InputReader``: the inputs of a session as sequences of ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.inference.batches import checked_ids
from fasttfm.inference.formats import Format, Tokens
from fasttfm.inference.network import Output
from fasttfm.inference.settings import EmbedSettings


class InputReader:
    """Reads texts, pairs of texts and lists of ids.

    Args:
        tokenizer, form: None where inputs are ids.
        settings: The prompt, and whether texts are lowercased.
        max_positions: The maximum number of ids of an input.
        vocabulary: Ids are less than it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        form: Format | None,
        settings: EmbedSettings,
        max_positions: int,
        vocabulary: int,
    ) -> None:
        self.tokenizer, self.form, self.settings = tokenizer, form, settings
        self.max_positions, self.vocabulary = max_positions, vocabulary

    def read(self, inputs: Sequence[Any]) -> list[Tokens]:
        """The sequences of inputs. Inputs that are lists of ids get no special tokens."""
        checked = checked_ids(inputs, self.max_positions, self.vocabulary)
        if checked is not None:  # copies: the caller may change the inputs before they are computed
            return [Tokens(ids, []) for ids in checked.unsorted(len(inputs))]  # type: ignore[arg-type]
        sequences: list[Tokens | None] = [None] * len(inputs)
        texts: list[str] = []
        counts: list[tuple[int, int]] = []  # the index of each input that is text, and how many texts it has
        for index, item in enumerate(inputs):
            if isinstance(item, str):
                counts.append((index, 1))
                texts.append(self.with_prompt(item))
            elif isinstance(item, tuple) and len(item) == 2 and all(isinstance(text, str) for text in item):
                if self.settings.prompt:
                    raise ValueError("Session: inputs: expected single texts with a prompt, got a pair")
                counts.append((index, 2))
                texts += map(self.with_prompt, item)
            else:
                sequences[index] = self._from_ids(item)
        if len(counts) < len(inputs):
            self._check_values([tokens.ids for tokens in sequences if tokens is not None])  # type: ignore[misc]
        if texts:
            if self.tokenizer is None or self.form is None:
                raise ValueError("Session: tokenizer: expected one for texts, got None")
            ids = iter(self.tokenizer.encode_batch(texts))
            for index, count in counts:
                sequences[index] = self.form.one(next(ids)) if count == 1 else self.form.two(next(ids), next(ids))
        return sequences  # type: ignore[return-value]

    @property
    def fill(self) -> int | None:
        """The id of tokens at the end of queries that no token attends to; None without them."""
        tokens = self.settings.late_interaction
        return None if tokens is None or tokens.attends else tokens.fill_id(self.tokenizer)

    @property
    def special(self) -> list[int]:
        """The ids of special tokens that say nothing of a text: not [MASK]."""
        if self.tokenizer is None:
            return []
        known = self.tokenizer.special
        return [id for id in known.all() if id != known.mask]

    def prompt_tokens(self) -> int:
        """The number of tokens at the beginning of a text that are not pooled."""
        if self.tokenizer is None or self.form is None or self.settings.pool_prompt:
            return 0
        prompt = self.tokenizer.encode(self.with_prompt(""))
        return len(self.form.first) + len(prompt) if prompt else 0

    def _from_ids(self, numbers: Any) -> Tokens:
        """A sequence of given ids. ``_check_values`` validates the values of all sequences together."""
        try:
            # a copy, as in read
            ids = np.array(numbers.detach().cpu().numpy() if isinstance(numbers, Tensor) else numbers)
        except (ValueError, TypeError):  # lists within lists, and dtypes that numpy does not have
            ids = np.empty((0, 0))
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise TypeError(f"Session: inputs: expected texts, pairs of texts or lists of ids, got {numbers!r:.80}")
        if ids.size > self.max_positions:
            raise ValueError(f"Session: inputs: expected up to {self.max_positions} ids, got {ids.size}")
        return Tokens(ids, [])  # type: ignore[arg-type]

    def _check_values(self, ids: Sequence[np.ndarray]) -> None:
        every = np.concatenate(ids)
        if every.size and (every.min() < 0 or every.max() >= self.vocabulary):
            got = f"{int(every.min())} to {int(every.max())}"
            raise ValueError(f"Session: inputs: expected ids from 0 to {self.vocabulary - 1}, got {got}")

    def with_prompt(self, text: str) -> str:
        """The text as it is tokenized."""
        text = self.settings.prompt + text
        return text.lower() if self.settings.lowercase else text


def readers_of_sides(reader: InputReader) -> dict[Output, InputReader]:
    """The readers of documents and of queries, where texts have a vector for each token, and of questions with their
    contexts, which have segment 1 for every model."""
    tokens = reader.settings.late_interaction
    readers: dict[Output, InputReader] = {}
    for output, is_query in ((Output.MULTI, False), (Output.MULTI_QUERY, True)):
        settings, form = reader.settings, reader.form
        if tokens is not None and form is not None and reader.tokenizer is not None:
            settings = replace(settings, prompt=(tokens.query if is_query else tokens.document).prompt)
            form = tokens.form(form, reader.tokenizer, query=is_query)
        readers[output] = InputReader(reader.tokenizer, form, settings, reader.max_positions, reader.vocabulary)
    form = None if reader.form is None else replace(reader.form, segments=True)
    readers[Output.SPANS] = InputReader(
        reader.tokenizer, form, reader.settings, reader.max_positions, reader.vocabulary
    )
    return readers
