"""``TextReader``: the sequences of a request's texts, pairs and ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fasttfm.data.tokenizer import Tokenizer
from fasttfm.inference.formats import Format, Tokens
from fasttfm.serve import errors


class TextReader:
    """Reads inputs as a model's sequences. Its methods may be called from several threads.

    Args:
        prompts: Texts that are put in front of each text, by name.
        default_prompt: The prompt without a name; ``""`` for none.
        lowercase: Whether texts are lowercased first, whatever the tokenizer does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: Format,
        *,
        prompts: Mapping[str, str] | None = None,
        default_prompt: str = "",
        lowercase: bool = False,
        fixed_prompt: bool = False,
    ) -> None:
        self.tokenizer, self.form = tokenizer, form
        self.prompts, self.default_prompt = dict(prompts or {}), default_prompt
        self._lowercase, self._fixed_prompt = lowercase, fixed_prompt

    def prompt(self, name: str | None) -> str:
        if name is None:
            return self.default_prompt
        if name not in self.prompts or (self._fixed_prompt and self.prompts[name] != self.default_prompt):
            known = ", ".join(self.prompts) or "none"
            raise errors.RequestError(
                422,
                "Validation",
                f"Input validation error: `prompt_name`: expected one of the model's prompts ({known})",
                param="prompt_name",
            )
        return self.prompts[name]

    def read(
        self, items: Sequence[Any], *, prompt: str = "", truncate: bool = True, left: bool = False
    ) -> list[Tokens]:
        """The sequences of texts, pairs of texts (tuples) and lists of ids.

        Args:
            truncate: Whether longer inputs lose tokens; otherwise they raise.
            left: Whether they lose their first tokens instead of their last ones.
        """
        return self.sequences(items, self.encode(self.texts(items, prompt)), truncate=truncate, left=left)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts."""
        return self.tokenizer.encode_batch(texts) if texts else []

    def texts(self, items: Sequence[Any], prompt: str) -> list[str]:
        """The texts that ``sequences`` needs the ids of."""
        texts: list[str] = []
        for item in items:
            if isinstance(item, str):
                texts.append(self._text(item, prompt))
            elif isinstance(item, tuple):
                texts += (self._text(item[0], prompt), self._text(item[1], prompt))
        return texts

    def sequences(
        self,
        items: Sequence[Any],
        encoded: Iterable[list[int]],
        *,
        truncate: bool = True,
        left: bool = False,
    ) -> list[Tokens]:
        """What ``read`` returns, from the ids of ``texts``."""
        ids, sequences = iter(encoded), []
        for item in items:
            if isinstance(item, str):
                tokens = self._one(next(ids), left)
            elif isinstance(item, tuple):
                tokens = self._two(next(ids), next(ids), left)
            else:
                tokens = self._from_ids(item, left)
            if tokens.cut and not truncate:
                raise errors.too_long(self.form.max_length, len(tokens.ids) + tokens.cut)
            sequences.append(tokens)
        return sequences

    def _text(self, text: str, prompt: str) -> str:
        if not text:
            raise errors.empty("inputs")
        text = prompt + text
        return text.lower() if self._lowercase else text

    def _one(self, ids: list[int], left: bool) -> Tokens:
        form = self.form
        if not left:
            return form.one(ids)
        room = max(0, form.max_length - len(form.first) - len(form.last))
        return form.one(ids[max(0, len(ids) - room) :])._replace(cut=max(0, len(ids) - room))

    def _two(self, first: list[int], second: list[int], left: bool) -> Tokens:
        joined = self.form.two(first, second)
        if not left or not joined.cut:
            return joined
        room = max(0, self.form.room)
        kept = min(len(first), max(room - len(second), room // 2))
        rest = second[len(second) - max(0, room - kept) :]
        return self.form.joined(first[len(first) - kept :], rest)._replace(cut=joined.cut)

    def _from_ids(self, ids: list[int], left: bool) -> Tokens:
        """Ids that begin with the format's first tokens are complete; others get special tokens around them."""
        if not ids:
            raise errors.empty("inputs")
        if max(ids) >= self.tokenizer.vocab_size:
            expected = f"ids from 0 to {self.tokenizer.vocab_size - 1}"
            raise errors.invalid("inputs", expected, max(ids))
        first, last = list(self.form.first), list(self.form.last)
        if first and ids[: len(first)] == first:
            ids = ids[len(first) :]
            ids = ids[: -len(last)] if last and ids[-len(last) :] == last else ids
        return self._one(ids, left)

    def describe(self, text: str, *, special: bool) -> list[dict[str, Any]]:
        """The tokens of a text, as TEI's ``/tokenize`` describes them."""
        ids, offsets = self.tokenizer.encode_with_offsets(text.lower() if self._lowercase else text)
        tokens = [
            {"id": id, "text": text[start:stop], "special": False, "start": start, "stop": stop}
            for id, (start, stop) in zip(ids, offsets, strict=True)
        ]
        if not special:
            return tokens
        return [*map(self._special, self.form.first), *tokens, *map(self._special, self.form.last)]

    def _special(self, id: int) -> dict[str, Any]:
        return {"id": id, "text": self.tokenizer.token(id), "special": True, "start": None, "stop": None}
