"""Writes documents on the subjects of ``subjects.txt``: ``documents(subjects, seed, size)``.

A section of the file is a subject: word lists, then sentences; lists of the section [words] belong to all subjects. The
entries of a list are separated by commas, and a line that ends in one continues. The entries of
``animal(name, home) = 곰/산, 고래/바다`` have fields. In a sentence

    {animal}            is a word, the same one in the whole document; {animal2} is another one of the same list
    {animal*}           is a word that is drawn for this sentence
    {animal.home}       is a field of the entry
    {animal:은}         has a particle, {animal:을_} is only the particle
    {verb/었다}         has an ending
    [one|other]         is one of these
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from korean.grammar import particle, with_ending, with_particle

_LIST = re.compile(r"(\w+)(?:\(([\w, ]+)\))? = (.+)")
_SLOT = re.compile(r"\{([a-z]+)(\d?)(\*?)(?:\.([a-z]+))?(?:([:/])([^}]+))?\}")
_CHOICE = re.compile(r"\[([^\]]+)\]")
_KEPT = 0.8  # the probability that a document has a sentence

Entry = dict[str, str]


@dataclass
class Subject:
    name: str
    lists: dict[str, list[Entry]]
    sentences: list[str] = field(default_factory=list)


def read_subjects(path: Path) -> list[Subject]:
    """The subjects of a file."""
    common: dict[str, list[Entry]] = {}
    subjects: list[Subject] = []
    text = re.sub(r",\n\s*", ", ", path.read_text(encoding="utf-8"))
    for line in text.splitlines():
        match = _LIST.fullmatch(line)
        if line.startswith("[") and line.endswith("]") and line[1:-1].isascii():
            if line != "[words]":
                subjects.append(Subject(line[1:-1], dict(common)))
        elif match is not None:
            lists = subjects[-1].lists if subjects else common
            fields = [name.strip() for name in (match[2] or "name").split(",")]
            rows = [entry.split("/") for entry in match[3].split(", ")]
            if wrong := [row for row in rows if len(row) != len(fields)]:
                raise ValueError(f"{path.name}: {match[1]}: expected entries of {len(fields)} fields, got {wrong[0]}")
            lists[match[1]] = [dict(zip(fields, row, strict=True)) for row in rows]
        elif line.strip() and not line.startswith("#"):
            subjects[-1].sentences.append(line)
    return subjects


def documents(subjects: list[Subject], seed: int, size: int) -> Iterator[list[str]]:
    """Documents on all subjects in turn, as lists of sentences, until they have ``size`` bytes of UTF-8."""
    random = np.random.Generator(np.random.Philox(key=seed))
    written = 0
    while True:
        for subject in subjects:
            lines = _Document(subject, random).sentences()
            written += sum(len(line.encode()) + 1 for line in lines) + 1
            yield lines
            if written >= size:
                return


class _Document:
    """One document, with the words that it uses throughout."""

    def __init__(self, subject: Subject, random: np.random.Generator) -> None:
        self.subject, self.random = subject, random
        self.words: dict[tuple[str, str], Entry] = {}

    def sentences(self) -> list[str]:
        return [self._sentence(line) for line in self.subject.sentences if self.random.random() < _KEPT]

    def _sentence(self, line: str) -> str:
        drawn: dict[tuple[str, str], Entry] = {}
        line = _CHOICE.sub(lambda match: str(self.random.choice(match[1].split("|"))), line)
        return _SLOT.sub(lambda match: self._filled(match, drawn), line)

    def _filled(self, match: re.Match[str], drawn: dict[tuple[str, str], Entry]) -> str:
        name, number, fresh, part, kind, form = match.groups()
        entry = self._entry(drawn if fresh else self.words, name, number, drawn)
        word = entry[part or "name"]
        if kind == "/":
            return with_ending(word, form)
        if kind == ":":
            return particle(word, form[:-1]) if form.endswith("_") else with_particle(word, form)
        return word

    def _entry(
        self, words: dict[tuple[str, str], Entry], name: str, number: str, drawn: dict[tuple[str, str], Entry]
    ) -> Entry:
        key = (name, number)
        if key not in words:
            listed = self.subject.lists[name]
            used = [entry for entries in (self.words, drawn) for (other, _), entry in entries.items() if other == name]
            free = [entry for entry in listed if entry not in used] or listed
            words[key] = free[int(self.random.integers(len(free)))]
        return words[key]
