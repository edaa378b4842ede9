"""``EntityLinker``: finds the entities of a knowledge graph in plain text, by a table of their names.

A table has one name per line: ``name<TAB>entity``, for example ``the White Whale<TAB>Moby Dick``. From left to right,
the longest name that starts at a word is taken, as it is written. In Korean, particles may follow a name (한강은:
한강); in scripts without spaces a name may be anywhere.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from pathlib import Path

from fasttfm.data.grounding import without_spaces
from fasttfm.data.knowledge import Span
from fasttfm.data.korean_forms import are_particles, is_hangul
from fasttfm.data.lines import data_error, read_lines


def read_entity_names(path: str | Path) -> dict[str, str]:
    """The entity of each name in a table."""
    path = Path(path)
    entities: dict[str, str] = {}
    for line, text in read_lines(path):
        if not text.strip():
            continue
        parts = [part.strip() for part in text.split("\t")]
        if len(parts) != 2 or not all(parts):
            raise data_error(path, "a name and its entity, separated by a tab", f"{text!r:.80}", line=line)
        name, entity = parts
        if entities.setdefault(name, entity) != entity:
            raise data_error(path, f"one entity for the name {name!r}", f"{entities[name]!r} and {entity!r}", line=line)
    if not entities:
        raise data_error(path, "names and their entities, one per line", "none")
    return entities


class EntityLinker:
    """Links names in texts with entities.

    Args:
        names: The entity of each name.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = {unicodedata.normalize("NFC", name): entity for name, entity in names.items()}
        sizes: dict[str, set[int]] = {}  # of the names that start with these two characters or this one
        for name in self.names:
            sizes.setdefault(name[:2], set()).add(len(name))
        self._sizes = {start: sorted(lengths, reverse=True) for start, lengths in sizes.items()}

    def link(self, text: str) -> list[Span]:
        """The spans of the names in a text, which is in Unicode's composed form (NFC)."""
        spans: list[Span] = []
        start = 0
        while start < len(text):
            size = self._size(text, start) if _may_start(text, start) else 0
            if size:
                spans.append(Span(start, start + size, self.names[text[start : start + size]]))
            start += max(size, 1)
        return spans

    def _size(self, text: str, start: int) -> int:
        """The length of the longest name that starts here; 0 if there is none."""
        sizes = (*self._sizes.get(text[start : start + 2], ()), *self._sizes.get(text[start], ()))
        matching = (size for size in sizes if text[start : start + size] in self.names)
        return next((size for size in matching if _may_end(text, start + size)), 0)


def _may_start(text: str, start: int) -> bool:
    """Whether a word, or a character of a script without spaces, starts here."""
    return start == 0 or not text[start - 1].isalnum() or without_spaces(text[start]) or without_spaces(text[start - 1])


def _may_end(text: str, end: int) -> bool:
    """Whether a name may end here: before a character that is not of its word, or before Korean particles."""
    rest = end
    while rest < len(text) and text[rest].isalnum() and not without_spaces(text[rest]):
        rest += 1
    if rest == end or without_spaces(text[end - 1]):
        return True
    return is_hangul(text[end:rest]) and are_particles(text[end:rest])
