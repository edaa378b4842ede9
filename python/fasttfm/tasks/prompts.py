"""Prompts, which describe a task to a model in its input, by a text and by examples (GPT-3; Brown et al., 2020)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fasttfm.data.lines import data_error, read_json_lines
from fasttfm.data.tokenizer import Tokenizer

TEMPLATE = "Input: {input}\nOutput: {output}"


class Shot(NamedTuple):
    """An example of a question and its answer."""

    input: str
    output: str


def read_shots(path: str | Path) -> list[Shot]:
    """Reads a .jsonl file with one object per line, which has the texts ``input`` and ``output``."""
    shots = []
    for number, line, row in read_json_lines(Path(path)):
        question, answer = (row.get("input"), row.get("output")) if isinstance(row, dict) else (None, None)
        if not isinstance(question, str) or not isinstance(answer, str):
            raise data_error(path, 'an object with two texts, "input" and "output"', f"{line:.60}", line=number)
        shots.append(Shot(question, answer))
    if not shots:
        raise data_error(path, "examples, one object per line", "none")
    return shots


@dataclass(frozen=True)
class Prompt:
    """A description, examples in a template, and a question in the same template without its answer.

    No example is called zero-shot, one example one-shot, more few-shot. Without examples, description and template, the
    prompt is the question itself.

    Args:
        template: The format of an example; the prompt ends before the question's {output}. ``TEMPLATE`` by default.
        separator: The text between the description, the examples and the question.
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
        # No space at the end: the tokens of words include the space before them.
        return self.separator.join([*parts, self._filled(question)]).rstrip(" ")

    def fitting(self, question: str, size: Callable[[str], int], most: int) -> Prompt:
        """This prompt with as many of its last examples as fit into ``most`` tokens; ``size`` counts a text's
        tokens."""
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
        """The start of an answer: the spaces before the template's {output}, which are not at the end of a prompt."""
        before = self.form.removesuffix("{output}")
        return before[len(before.rstrip(" ")) :]

    def _filled(self, question: str) -> str:
        return self.form.removesuffix("{output}").replace("{input}", question)


def until(pieces: Iterator[str], stop: str) -> Iterator[str]:
    """Yields the pieces of a text up to ``stop``, or all of them if ``stop`` is empty. A piece that may be the start of
    ``stop`` is delayed until the next one decides."""
    if not stop:
        yield from pieces
        return
    held = ""
    for piece in pieces:
        held += piece
        if stop in held:
            held = held[: held.index(stop)]
            break
        waits = next(size for size in range(len(stop) - 1, -1, -1) if held.endswith(stop[:size]))
        certain, held = held[: len(held) - waits], held[len(held) - waits :]
        if certain:
            yield certain
    if held:
        yield held


def text_pieces(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Yields the text of tokens one by one; a character of several tokens comes with its last token."""
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
    rest = tokenizer.decode(ids)[size:]  # if the tokens end within a character
    if rest:
        yield rest
