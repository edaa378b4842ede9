"""Knowledge graphs, mentions and labelled files about entities, and errors for wrong files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import addresses

from fasttfm.data import DataError, Tokenizer, shipped_task, train_tokenizer
from fasttfm.data.entity_linking import EntityLinker, read_entity_names
from fasttfm.data.knowledge import (
    Span,
    align,
    check_known,
    read_mentions,
    read_relations,
    read_triples,
    read_types,
)
from fasttfm.data.texts import shipped_knowledge

TEXT = "Captain Ahab sails the Pequod."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer("wordpiece", addresses(10), 600)


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


# ---- graphs ----------------------------------------------------------------------------------------------------------


def test_triples(tmp_path: Path) -> None:
    rows = ("Ahab\tsails\tPequod", "", "Ishmael\tsails\tPequod", "Ahab\tsails\tPequod")
    graph = read_triples(written(tmp_path / "graph.tsv", *rows))
    assert (graph.entities, graph.relations) == (["Ahab", "Pequod", "Ishmael"], ["sails"])
    assert graph.triples.tolist() == [[0, 0, 1], [2, 0, 1]]  # each fact once
    again = read_triples(tmp_path / "graph.tsv", entities=["Pequod", "Ahab", "Ishmael"], relations=["sails"])
    assert again.triples.tolist() == [[1, 0, 0], [2, 0, 0]]
    for row, message in (
        ("Ahab\tsails", "line 1: expected a head, a relation and a tail, separated by tabs, got 'Ahab"),
        ("Ahab\t \tPequod", "line 1: expected a head, a relation and a tail"),
        ("", "expected triples, one per line, got none"),
    ):
        with pytest.raises(DataError, match=message):
            read_triples(written(tmp_path / "bad.tsv", row))
    with pytest.raises(DataError, match=r"graph.tsv, line 3: expected one of the 2 known entities, got 'Ishmael'"):
        read_triples(tmp_path / "graph.tsv", entities=["Ahab", "Pequod"])
    with pytest.raises(DataError, match=r"line 1: expected one of the 1 known relations, got 'sails'"):
        read_triples(tmp_path / "graph.tsv", relations=["hunts"])


def test_a_split_leaves_training_facts_for_every_entity() -> None:
    graph = read_triples(shipped_knowledge("triples"))
    train, test = graph.split(0.1, seed=0)
    assert len(train) + len(test) == len(graph.triples)
    assert len(test) == round(0.1 * len(graph.triples))
    assert len(train[:, [0, 2]].unique()) == len(graph.entities)
    assert len(train[:, 1].unique()) == len(graph.relations)
    assert not torch.equal(test, graph.split(0.1, seed=1)[1])


# ---- mentions --------------------------------------------------------------------------------------------------------


def test_mentions_are_aligned_with_first_tokens(tokenizer: Tokenizer, tmp_path: Path) -> None:
    spans = [{"start": 23, "end": 29, "entity": "ship"}, {"start": 0, "end": 12, "entity": "Ahab"}]
    (example,) = read_mentions(written(tmp_path / "mentions.jsonl", {"text": TEXT, "entities": spans}))
    assert example.entities == [Span(0, 12, "Ahab"), Span(23, 29, "ship")]
    aligned = align(tokenizer, example.text, example.entities, {"Ahab": 4, "ship": 7})
    places = {TEXT[aligned.offsets[place][0] :].split()[0]: id for place, id in enumerate(aligned.entities) if id >= 0}
    assert places == {"Captain": 4, "Pequod.": 7}
    assert len(aligned.ids) > 6  # names are several tokens
    unknown = align(tokenizer, example.text, example.entities, {"Ahab": 4})
    assert [id for id in unknown.entities if id >= 0] == [4]  # an entity that the graph does not have is left out
    check_known([example], ["ship"], "file")
    with pytest.raises(DataError, match="file: expected mentions of the 1 entities of the graph, got 'Ahab', 'ship'"):
        check_known([example], ["whale"], "file")


BAD_SPANS = [
    (
        {"start": 20, "end": 31},
        r"line 2: expected entities\[0\] with 0 <= start < end <= 30, .* got start 20 and end 31",
    ),
    ({"start": -1, "end": 4}, r"expected entities\[0\] with 0 <= start"),
    ({"start": 4, "end": 4}, r"expected entities\[0\] with 0 <= start"),
    ({"start": "0", "end": 4}, r"with whole numbers 'start' and 'end'"),
    ({"start": 0, "end": 4, "entity": 7}, r"perhaps a text 'entity'"),
    (7, r"with whole numbers 'start' and 'end'"),
]


@pytest.mark.parametrize(("span", "message"), BAD_SPANS)
def test_invalid_spans(span: Any, message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "mentions.jsonl", {"text": TEXT}, {"text": TEXT, "entities": [span]})
    with pytest.raises(DataError, match=message):
        read_mentions(path)


def test_overlapping_spans_are_named(tmp_path: Path) -> None:
    spans = [{"start": 8, "end": 18, "entity": "a"}, {"start": 0, "end": 12, "entity": "b"}]
    path = written(tmp_path / "mentions.jsonl", {"text": TEXT, "entities": spans})
    expected = (
        r"line 1: expected spans that do not overlap, got 'Captain Ahab' \(0 to 12\) and 'Ahab sails' \(8 to 18\)"
    )
    with pytest.raises(DataError, match=expected):
        read_mentions(path)
    row = {"text": TEXT, "head": spans[0], "tail": spans[1], "label": "x"}
    with pytest.raises(DataError, match="line 1: expected spans that do not overlap"):
        read_relations(written(tmp_path / "relations.jsonl", row))


BAD_ROWS: list[tuple[Callable[[Path], Any], Any, str]] = [
    (read_mentions, "[1]", "line 1: expected a JSON object, got"),
    (read_mentions, {"text": 7}, "expected a string 'text', got 7"),
    (read_mentions, {"text": TEXT, "entities": 7}, "expected a list 'entities', got 7"),
    (read_mentions, "", "expected texts with entities, one per line, got none"),
    (read_relations, {"text": TEXT, "head": {"start": 0, "end": 1}}, "expected 'tail' with whole numbers"),
    (
        read_relations,
        {"text": TEXT, "head": {"start": 0, "end": 1}, "tail": {"start": 2, "end": 3}, "label": 1},
        "expected a string 'label', or none, got 1",
    ),
    (read_relations, "", "expected examples, one per line, got none"),
    (read_types, {"text": TEXT}, "expected 'mention' with whole numbers"),
    (
        read_types,
        {"text": TEXT, "mention": {"start": 0, "end": 1}, "labels": "x"},
        "expected a list of strings 'labels'",
    ),
    (read_types, "", "expected examples, one per line, got none"),
]


@pytest.mark.parametrize(("read", "row", "message"), BAD_ROWS)
def test_invalid_rows(read: Callable[[Path], Any], row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read(written(tmp_path / "rows.jsonl", row))


# ---- shipped data ----------------------------------------------------------------------------------------------------


def test_the_shipped_graph_and_its_texts() -> None:
    graph = read_triples(shipped_knowledge("triples"))
    mentions = read_mentions(shipped_knowledge("mentions"))
    named = Counter(span.entity for example in mentions for span in example.entities)
    assert set(named) <= set(graph.entities)
    assert len(mentions) > 500
    assert len(named) > 80
    with pytest.raises(ValueError, match="shipped_knowledge: name: expected one of triples, mentions, got 'x'"):
        shipped_knowledge("x")


def test_dev_sets_are_about_places_that_training_sets_do_not_name() -> None:
    regions = {"Europe", "Asia", "Africa", "South America", "Central America", "United States"}
    parts = {part: read_relations(path) for part, path in shipped_task("relation").items()}
    named = {
        part: {span.entity for example in rows for span in (example.head, example.tail)} - regions
        for part, rows in parts.items()
    }
    assert named["train"]
    assert named["dev"]
    assert not named["train"] & named["dev"]
    assert not {example.text for example in parts["train"]} & {example.text for example in parts["dev"]}
    assert {example.label for example in parts["train"]} == {example.label for example in parts["dev"]}
    types = {part: read_types(path) for part, path in shipped_task("entity-typing").items()}
    assert not {example.mention.entity for example in types["train"]} & {
        example.mention.entity for example in types["dev"]
    }


# ---- names in plain text ---------------------------------------------------------------------------------------------


def test_names_are_linked(tmp_path: Path) -> None:
    """The longest name at the start of a word, with Korean particles, and anywhere in scripts without spaces."""
    table = written(
        tmp_path / "names.tsv", "White Whale\tMoby Dick", "Moby\tMoby Dick", "한강\tHan", "한\tOne", "花\tflower"
    )
    linker = EntityLinker({**read_entity_names(table), "Moby Dick Inn": "Inn"})

    def found(text: str) -> list[tuple[str, str | None]]:
        return [(text[span.start : span.end], span.entity) for span in linker.link(text)]

    assert found("Moby's inn: the Moby Dick Inn, Mobyish whales, a White Whale!") == [
        ("Moby", "Moby Dick"),
        ("Moby Dick Inn", "Inn"),
        ("White Whale", "Moby Dick"),
    ]
    assert found("한강은 길다. 한강에서도, 남한강에서는 한강변을") == [("한강", "Han"), ("한강", "Han")]
    assert found("桜の花が咲く") == [("花", "flower")]
    for row, message in (
        ("Moby", "line 1: expected a name and its entity, separated by a tab, got 'Moby'"),
        ("", "expected names and their entities, one per line, got none"),
        ("Moby\tA\nMoby\tB", "line 2: expected one entity for the name 'Moby', got 'A' and 'B'"),
    ):
        with pytest.raises(DataError, match=message):
            read_entity_names(written(tmp_path / "bad.tsv", row))


def test_mentions_of_plain_text(tmp_path: Path) -> None:
    link = EntityLinker({"Ahab": "Ahab"}).link
    path = tmp_path / "texts.txt"
    path.write_text("Ahab sails.\nHe hunts.\n\nNobody sails.\n")
    assert [example.entities for example in read_mentions(path, link)] == [[Span(0, 4, "Ahab")], []]
    with pytest.raises(DataError, match=r"texts.txt: expected JSON lines with the entities of each text, got plain"):
        read_mentions(path)
    rows = [{"text": "Ahab sails."}, {"text": "Ahab sails.", "entities": []}]
    examples = read_mentions(written(tmp_path / "texts.jsonl", *rows), link)
    assert [example.entities for example in examples] == [[Span(0, 4, "Ahab")], []]  # stated mentions are kept
