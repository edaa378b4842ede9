"""Knowledge graphs and the texts that mention their entities.

triples     .tsv, a line ``head<TAB>relation<TAB>tail`` for each fact; names are any texts without tabs
mentions    JSONL, a line for each text: {"text": "Ahab sails the Pequod.", "entities": [{"start": 0, "end": 4,
            "entity": "Ahab"}, ...]}; a mention has the characters from ``start`` up to, but without, ``end``. In lines
            without "entities", and in plain text (.txt, blank lines between texts), names are linked with entities
            (``data.entity_linking``)

Spans are inside their text and do not overlap; they may be in any order. Mentions of entities that the graph does not
have are ignored. Files may be compressed (.gz).
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.graphs import ConceptGraph
from fasttfm.data.lines import DataError, data_error, read_json_lines, read_lines
from fasttfm.data.texts import read_documents
from fasttfm.data.tokenizer import Tokenizer

Example = TypeVar("Example")

# ---- graphs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Graph:
    """A knowledge graph: the names of entities and relations, and facts as triples of their numbers."""

    entities: list[str]
    relations: list[str]
    triples: Tensor  # int64 [facts, 3]: head, relation, tail

    def split(self, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
        """Splits the triples into a training set and a test set with about ``fraction`` of them, at least one. Every
        entity and relation is in the training set."""
        order = torch.randperm(
            len(self.triples), generator=torch.Generator("cpu").manual_seed(seed), device="cpu"
        ).tolist()
        test_size = max(1, round(fraction * len(self.triples))) if fraction else 0
        rows: list[list[int]] = self.triples.tolist()
        uses = np.bincount(self.triples[:, [0, 2]].flatten().numpy(), minlength=len(self.entities))
        kinds = np.bincount(self.triples[:, 1].numpy(), minlength=len(self.relations))
        test: list[int] = []
        for number in order:
            head, relation, tail = rows[number]
            needed = {head: 1, tail: 1} if head != tail else {head: 2}
            if len(test) < test_size and kinds[relation] > 1 and all(uses[entity] > n for entity, n in needed.items()):
                test.append(number)
                kinds[relation] -= 1
                uses[head] -= 1
                uses[tail] -= 1
        chosen = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        chosen[test] = True
        return self.triples[~chosen], self.triples[chosen]


def read_triples(
    path: str | Path, *, entities: Sequence[str] | None = None, relations: Sequence[str] | None = None
) -> Graph:
    """The facts of a file, each once.

    Args:
        path: The file.
        entities, relations: The allowed names, in the order of their numbers; by default all names of the file, in the
            order in which they appear.
    """
    path = Path(path)
    numbers: list[dict[str, int]] = [
        {name: id for id, name in enumerate(names or ())} for names in (entities, relations)
    ]
    closed = (entities is not None, relations is not None)

    def number(kind: int, name: str, line: int) -> int:
        if name not in numbers[kind] and closed[kind]:
            expected = f"one of the {len(numbers[kind])} known {('entities', 'relations')[kind]}"
            raise data_error(path, expected, repr(name), line=line)
        return numbers[kind].setdefault(name, len(numbers[kind]))

    triples: dict[tuple[int, int, int], None] = {}
    for line, text in read_lines(path):
        if not text.strip():
            continue
        parts = [part.strip() for part in text.split("\t")]
        if len(parts) != 3 or not all(parts):
            raise data_error(path, "a head, a relation and a tail, separated by tabs", f"{text!r:.80}", line=line)
        head, relation, tail = parts
        triples[number(0, head, line), number(1, relation, line), number(0, tail, line)] = None
    if not triples:
        raise data_error(path, "triples, one per line", "none")
    return Graph([*numbers[0]], [*numbers[1]], torch.tensor([*triples], dtype=torch.int64, device="cpu"))


def facts_of(graph: ConceptGraph) -> Graph:
    """The edges of a graph of concepts as facts, without inverse relations."""
    forward = graph.relation_ids < len(graph.relations)
    rows = np.stack([graph.heads[forward], graph.relation_ids[forward], graph.tails[forward]], axis=1)
    return Graph(graph.concepts, graph.relations, torch.from_numpy(rows))


# ---- mentions --------------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """The characters of a text from ``start`` up to, but without, ``end``, and the entity that they name or None."""

    start: int
    end: int
    entity: str | None = None


@dataclass(frozen=True)
class MentionExample:
    text: str
    entities: list[Span]  # in their order in the text


def read_mentions(path: str | Path, link: Callable[[str], list[Span]] | None = None) -> list[MentionExample]:
    """The texts of a file with their aligned mentions. ``link`` finds the mentions of a text that has none stated, as
    ``EntityLinker.link``."""
    path = Path(path)
    if path.name.endswith((".txt", ".txt.gz")):
        if link is None:
            raise data_error(path, "JSON lines with the entities of each text", "plain text, and no names to link")
        examples = [linked(text, link) for text in read_documents(path)]
    else:
        examples = []
        for line, row in json_rows(path):
            text = text_of(path, line, row)
            if link is None or "entities" in row:
                examples.append(MentionExample(text, spans_of(path, line, row, text)))
            else:
                examples.append(linked(text, link))
    if not examples:
        raise data_error(path, "texts with entities, one per line", "none")
    return examples


def linked(text: str, link: Callable[[str], list[Span]]) -> MentionExample:
    """A text with the mentions that ``link`` finds."""
    text = unicodedata.normalize("NFC", text)
    return MentionExample(text, link(text))


def json_rows(path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yields the number and the object of every line."""
    for line, text, row in read_json_lines(path):
        if not isinstance(row, dict):
            raise data_error(path, "a JSON object", f"{text:.60}", line=line)
        yield line, row


def text_of(path: Path, line: int | None, row: Mapping[str, Any]) -> str:
    text = row.get("text")
    if not isinstance(text, str) or not text.strip():
        raise data_error(path, "a string 'text'", f"{text!r:.60}", line=line)
    return text


def spans_of(path: Path, line: int | None, row: Mapping[str, Any], text: str) -> list[Span]:
    """The row's ``entities`` in the order of their starts; empty without this key."""
    rows = row.get("entities", [])
    if not isinstance(rows, list):
        raise data_error(path, "a list 'entities'", f"{rows!r:.60}", line=line)
    spans = sorted(span_of(path, line, entity, text, f"entities[{number}]") for number, entity in enumerate(rows))
    check_disjoint(path, line, spans, text)
    return spans


def span_of(path: Path, line: int | None, row: Any, text: str, name: str) -> Span:
    """A span of the text. Raises DataError if it is not inside the text."""
    start, end, entity = (row.get(key) if isinstance(row, dict) else None for key in ("start", "end", "entity"))
    if type(start) is not int or type(end) is not int or not (entity is None or isinstance(entity, str)):
        expected = f"{name} with whole numbers 'start' and 'end', and perhaps a text 'entity'"
        raise data_error(path, expected, f"{row!r:.80}", line=line)
    if not 0 <= start < end <= len(text):
        expected = f"{name} with 0 <= start < end <= {len(text)}, the length of the text"
        raise data_error(path, expected, f"start {start} and end {end}", line=line)
    return Span(start, end, entity)


def check_disjoint(path: Path, line: int | None, spans: Sequence[Span], text: str) -> None:
    """Raises DataError if two of the sorted spans overlap."""
    for first, second in itertools.pairwise(spans):
        if second.start < first.end:
            got = f"{text[first.start : first.end]!r} ({first.start} to {first.end}) and "
            got += f"{text[second.start : second.end]!r} ({second.start} to {second.end})"
            raise data_error(path, "spans that do not overlap", got, line=line)


class AlignedTokens(NamedTuple):
    """A text's tokens, and for each token the number of the entity whose mention starts there, or -1."""

    ids: list[int]
    entities: list[int]
    offsets: list[tuple[int, int]]


def align(tokenizer: Tokenizer, text: str, spans: Sequence[Span], known: Mapping[str, int]) -> AlignedTokens:
    """Aligns each entity with the first token of its mention, as the paper and its release do. Spans without tokens and
    unknown entities are ignored."""
    ids, offsets = tokenizer.encode_with_offsets(text)
    entities = [-1] * len(ids)
    token = 0
    for span in spans:
        while token < len(ids) and offsets[token][1] <= span.start:
            token += 1
        if token < len(ids) and offsets[token][0] < span.end and span.entity is not None:
            entities[token] = known.get(span.entity, -1)
    return AlignedTokens(ids, entities, offsets)


def check_known(examples: Iterable[MentionExample], known: Collection[str], source: str) -> None:
    """Raises DataError if no mention is of a known entity, as with a graph that does not belong to the texts."""
    names = {span.entity for example in examples for span in example.entities if span.entity is not None}
    if names.isdisjoint(known):
        some = ", ".join(map(repr, sorted(names)[:3])) or "none"
        raise DataError(f"{source}: expected mentions of the {len(known)} entities of the graph, got {some}")


# ---- labelled files --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RelationExample:
    """Two marked spans of a text, and the relation of the first to the second."""

    text: str
    head: Span
    tail: Span
    entities: list[Span]  # other mentions
    label: str | None  # None in test sets


@dataclass(frozen=True)
class TypingExample:
    """A marked span of a text, and its types."""

    text: str
    mention: Span
    entities: list[Span]  # other mentions
    label: tuple[str, ...] | None  # None in test sets


def read_relations(path: str | Path) -> list[RelationExample]:
    """Reads lines {"text", "head": {"start", "end", "entity"}, "tail": {...}, "label"}, optionally with "entities"."""
    return _examples(Path(path), relation_of)


def relation_of(path: Path, line: int | None, row: Any) -> RelationExample:
    """The example of such a line."""
    text = text_of(path, line, row)
    head, tail = (span_of(path, line, row.get(name), text, f"{name!r}") for name in ("head", "tail"))
    check_disjoint(path, line, sorted([head, tail]), text)
    label = row.get("label")
    if label is not None and not isinstance(label, str):
        raise data_error(path, "a string 'label', or none", f"{label!r:.60}", line=line)
    return RelationExample(text, head, tail, spans_of(path, line, row, text), label)


def read_types(path: str | Path) -> list[TypingExample]:
    """Reads lines {"text", "mention": {"start", "end", "entity"}, "labels": [...]}, optionally with "entities"."""
    return _examples(Path(path), typing_of)


def typing_of(path: Path, line: int | None, row: Any) -> TypingExample:
    """The example of such a line."""
    text = text_of(path, line, row)
    mention, labels = span_of(path, line, row.get("mention"), text, "'mention'"), row.get("labels")
    if labels is not None and not (isinstance(labels, list) and all(isinstance(label, str) for label in labels)):
        raise data_error(path, "a list of strings 'labels', or none", f"{labels!r:.60}", line=line)
    types = None if labels is None else tuple(sorted(set(labels)))
    return TypingExample(text, mention, spans_of(path, line, row, text), types)


def _examples(path: Path, example_of: Callable[[Path, int, Any], Example]) -> list[Example]:
    examples = [example_of(path, line, row) for line, row in json_rows(path)]
    if not examples:
        raise data_error(path, "examples, one per line", "none")
    return examples
