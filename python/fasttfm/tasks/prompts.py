"""Prompts: a task told to a model in its own input, by a description and by examples (GPT-3; Brown et al., 2020)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fasttfm.data.lines import data_error, read_json_lines
from fasttfm.data.tokenizer import Tokenizer

TEMPLATE = "Input: {input}\nOutput: {output}"


class Shot(NamedTuple):
    """An example: what is asked and what is to be answered."""

    input: str
    output: str


def read_shots(path: str | Path) -> list[Shot]:
    """Examples from a .jsonl file: one object a line, with the texts ``input`` and ``output``."""
    shots = []
    for number, line, row in read_json_lines(Path(path)):
        question, answer = (row.get("input"), row.get("output")) if isinstance(row, dict) else (None, None)
        if not isinstance(question, str) or not isinstance(answer, str):
            raise data_error(path, 'an object with two texts, "input" and "output"', f"{line:.60}", line=number)
        shots.append(Shot(question, answer))
    if not shots:
        raise data_error(path, "examples, one object a line", "none")
    return shots


@dataclass(frozen=True)
class Prompt:
    """A description, examples in a form, and a question in the same form, to which the answer is missing.

    With no example this is called zero-shot, with one one-shot, with more few-shot. With no examples, no description
    and no template, the question is all there is, as it is.

    Args:
        template: The form of an example; the prompt ends where its {output} would begin. ``TEMPLATE`` by default.
        separator: Between the description, the examples and the question.
    """

    description: str = ""
    shots: Sequence[Shot] = ()
    template: str | None = None
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        names, template = ("{input}", "{output}"), self.form
        if any(template.count(name) != 1 for name in names) or not template.endswith("{output}"):
            expected = "{input} once and then {output}, once and at the end"
            raise ValueError(f"prompt: template: expected {expected}, got {self.template!r}")

    def text(self, question: str) -> str:
        if not self.description and not self.shots and self.template is None:
            return question
        parts = [self.description] if self.description else []
        parts += [self._filled(shot.input) + shot.output for shot in self.shots]
        # No space at the end: a vocabulary's words bring the space in front of them with them.
        return self.separator.join([*parts, self._filled(question)]).rstrip(" ")

    def fitting(self, question: str, size: Callable[[str], int], most: int) -> Prompt:
        """This prompt with as many of its last examples as ``most`` tokens hold, by ``size``, a text's tokens."""
        for left_out in range(len(self.shots) + 1):
            shorter = Prompt(self.description, self.shots[left_out:], self.template, self.separator)
            if size(shorter.text(question)) <= most:
                return shorter
        needed = size(Prompt(self.description, (), self.template, self.separator).text(question))
        raise ValueError(f"prompt: expected no more than {most} tokens without examples, got {needed}")

    @property
    def form(self) -> str:
        """The template, or the default one."""
        return TEMPLATE if self.template is None else self.template

    @property
    def answer_prefix(self) -> str:
        """What an answer begins with: the spaces in front of the template's {output}, which a prompt does not end
        in."""
        before = self.form.removesuffix("{output}")
        return before[len(before.rstrip(" ")) :]

    def _filled(self, question: str) -> str:
        return self.form.removesuffix("{output}").replace("{input}", question)


def until(pieces: Iterator[str], stop: str) -> Iterator[str]:
    """Pieces of a text up to where ``stop`` begins, as early as it is certain that it does not; all if it is empty."""
    if not stop:
        yield from pieces
        return
    held = ""
    for piece in pieces:
        held += piece
        if stop in held:
            held = held[: held.index(stop)]
            break
        # What may be the beginning of the stop waits for the next piece.
        waits = next(size for size in range(len(stop) - 1, -1, -1) if held.endswith(stop[:size]))
        certain, held = held[: len(held) - waits], held[len(held) - waits :]
        if certain:
            yield certain
    if held:
        yield held


def text_pieces(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """The text of tokens as they come; a letter that takes several tokens comes with its last one."""
    from tokenizers.decoders import DecodeStream

    decoder = DecodeStream(skip_special_tokens=True)
    ids: list[int] = []
    size = 0
    for token in tokens:
        ids.append(token)
        piece = decoder.step(tokenizer.backend, token)
        if piece:
            size += len(piece)
            yield piece
    rest = tokenizer.decode(ids)[size:]  # where the tokens end within a letter
    if rest:
        yield rest
