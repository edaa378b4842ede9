"""Graphs of concepts: files, paths, pruning, schema graphs, and concepts in text."""

from __future__ import annotations

import itertools
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch

from fasttfm.data.commonsense import read_commonsense
from fasttfm.data.graphs import ConceptGraph, GraphVectors, PathFinder, read_graph, read_graph_vectors, schema_graph
from fasttfm.data.grounding import Grounder, base_forms
from fasttfm.data.lines import DataError
from fasttfm.data.texts import shipped_graph
from fasttfm.models.entity_files import write_embeddings

EDGES = """\
AtLocation\tcup\tkitchen\t2.0
UsedFor\tcup\tdrinking tea\t1.0
AtLocation\tknife\tkitchen\t1.0
/r/RelatedTo\t/c/en/knife/n\t/c/en/Cup\t0.5
UsedFor\tknife\tcutting_bread
IsA\tcup\tcup\t1.0
AtLocation\tcup\tkitchen\t3.0
"""


@pytest.fixture
def edges(tmp_path: Path) -> Path:
    path = tmp_path / "edges.tsv"
    path.write_text(EDGES)
    return path


@pytest.fixture
def graph(edges: Path) -> ConceptGraph:
    return read_graph(edges)


# ---- files -----------------------------------------------------------------------------------------------------------


def test_an_edge_file(graph: ConceptGraph) -> None:
    assert graph.concepts == ["cup", "kitchen", "drinking_tea", "knife", "cutting_bread"]
    assert graph.relations == ["AtLocation", "UsedFor", "RelatedTo", "IsA"]
    assert len(graph.heads) == 2 * 5  # a duplicate edge counts once, a self-loop not at all
    assert graph.between(0, 1) == [(0, 3.0)]
    assert graph.between(1, 0) == [(4, 3.0)]
    assert graph.neighbours(0).tolist() == [1, 2, 3]
    assert graph.neighbours(4).tolist() == [3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected edges, one per line, got none"),
        ("AtLocation\tcup\n", "line 1: expected relation, head, tail and a weight or none, separated by tabs"),
        ("IsA\ta\tb\nIsA\ta\t \t1\n", "line 2: expected relation, head, tail"),
        ("IsA\ta\tb\theavy\n", "line 1: expected a weight from 0 on, got 'heavy'"),
        ("IsA\ta\tb\t-1\n", "line 1: expected a weight from 0 on, got '-1'"),
        ("IsA\ta\tb\tnan\n", "line 1: expected a weight from 0 on, got 'nan'"),
    ],
)
def test_bad_edge_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "edges.tsv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_graph(path)


def test_vectors(graph: ConceptGraph, tmp_path: Path) -> None:
    names, relations = ["unknown", *reversed(graph.concepts)], graph.relations
    rows = torch.arange(12.0).view(6, 2)
    write_embeddings(tmp_path, names, relations, rows, rows[:4])
    vectors = read_graph_vectors(tmp_path, graph)
    assert vectors.concepts[:, 0].tolist() == [10, 8, 6, 4, 2]
    assert vectors.relations[:, 0].tolist() == [0, 2, 4, 6]
    for entities, others, message in (
        (names[:-1], rows, r"entity2id.txt: expected every name of the graph, got none for 'cup'"),
        (names, rows[:5], r"entity2vec.vec: expected a vector for each of the 6 names of entity2id.txt, got 5"),
        (names, torch.ones(6, 3), r"relation2vec.vec: expected vectors of the entities' width 3, got 2"),
    ):
        write_embeddings(tmp_path, entities, relations, others[: len(others) - 6 + len(entities)], rows[:4])
        with pytest.raises(DataError, match=message):
            read_graph_vectors(tmp_path, graph)


# ---- paths -----------------------------------------------------------------------------------------------------------


def random_graph(concepts: int, edges: int, seed: int) -> ConceptGraph:
    from fasttfm.data.graphs import _bidirectional

    random = np.random.default_rng(seed)
    rows = {tuple(map(int, row)): 1.0 for row in random.integers(0, (concepts, 3, concepts), (edges, 3))}
    return _bidirectional([f"c{i}" for i in range(concepts)], ["a", "b", "c"], rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(3))
def test_every_simple_path_is_found_once(seed: int) -> None:
    graph = random_graph(7, 14, seed)
    steps = set(zip(graph.heads.tolist(), graph.relation_ids.tolist(), graph.tails.tolist(), strict=True))
    finder = PathFinder(graph, most_paths=10_000)
    for source, target in itertools.permutations(range(7), 2):
        expected = set()
        for length in (1, 2, 3):
            for inside in itertools.permutations(set(range(7)) - {source, target}, length - 1):
                concepts = (source, *inside, target)
                for relations in itertools.product(range(6), repeat=length):
                    if set(zip(concepts, relations, concepts[1:], strict=False)) <= steps:
                        expected.add((concepts, relations))
        paths = finder.find(source, target)
        assert {(path.concepts, path.relations) for path in paths} == expected
        assert len(paths) == len(expected)
        lengths = [len(path.relations) for path in paths]
        assert lengths == sorted(lengths)


def test_limits_of_paths(graph: ConceptGraph) -> None:
    cup, kitchen, bread = (graph.numbers[name] for name in ("cup", "kitchen", "cutting_bread"))
    assert [path.concepts for path in PathFinder(graph).find(cup, bread)] == [(0, 3, 4), (0, 1, 3, 4)]
    assert len(PathFinder(graph, hops=2).find(cup, bread)) == 1
    assert PathFinder(graph, hops=1).find(cup, bread) == []
    assert len(PathFinder(graph, most_paths=1).find(cup, kitchen)) == 1
    assert PathFinder(graph).find(cup, cup) == []
    for options, message in (
        ({"hops": 4}, "hops: expected 1, 2 or 3, got 4"),
        ({"least_score": 2}, r"least_score: expected a number in \[0, 1\], got 2"),
        ({"most_paths": 0}, "most_paths: expected 1 or more, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            PathFinder(graph, **options)  # type: ignore[arg-type]


def test_paths_are_pruned_by_their_scores(graph: ConceptGraph) -> None:
    """A triple's score is (1 + the cosine of relation and step) / 2, also if it is followed backwards."""
    concepts = np.array([[0, 0], [1, 0], [0, 1], [0, 1], [0, 3]], dtype=np.float32)
    relations = np.array([[1, 0], [0, 1], [1, 0], [1, 1]], dtype=np.float32)
    finder = PathFinder(graph, GraphVectors(concepts, relations), least_score=0.0)
    direct, around = finder.find(0, 4)
    assert direct.score == pytest.approx(0.5 * 1.0)  # RelatedTo^-1 at a right angle, then UsedFor as it is meant
    assert around.score == pytest.approx(1.0 * (1 + 0.5**0.5) / 2 * 1.0)
    pruned = PathFinder(graph, GraphVectors(concepts, relations), least_score=0.6)
    assert [path.concepts for path in pruned.find(0, 4)] == [(0, 1, 3, 4)]


def test_a_schema_graph(graph: ConceptGraph) -> None:
    cup, kitchen, tea, knife, bread = range(5)
    schema = schema_graph(PathFinder(graph, hops=2), [cup, kitchen], [bread, tea])
    assert schema.concepts == [cup, kitchen, bread, tea, knife]
    assert schema.edges == [(0, 1), (0, 3), (0, 4), (1, 4), (2, 4)]  # cup and kitchen are joined as the question's
    assert [(pair.question, pair.answer, len(pair.paths)) for pair in schema.pairs] == [
        (0, 2, 1),
        (0, 3, 1),
        (1, 2, 1),
        (1, 3, 1),
    ]
    far = schema_graph(PathFinder(graph, hops=1), [kitchen], [bread])
    assert (far.edges, far.pairs[0].paths) == ([], [])


# ---- concepts in text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "base"),
    [
        *[("cups", "cup"), ("boxes", "box"), ("cities", "city"), ("running", "run"), ("baking", "bake")],
        *[("tried", "try"), ("stopped", "stop"), ("knives", "knife"), ("children", "child"), ("happiest", "happy")],
        *[("bus", "bus"), ("went", "go"), ("walked", "walk"), ("larger", "large"), ("mice", "mouse")],
    ],
)
def test_base_forms(word: str, base: str) -> None:
    assert base in base_forms(word)


def test_grounding() -> None:
    concepts = ["cup", "drinking_tea", "tea", "the", "kitchen_table", "kitchen", "drink_tea_of_mint", "glass"]
    grounder = Grounder(concepts)

    def names(text: str) -> list[str]:
        return [concepts[number] for number in grounder.ground(text)]

    assert names("The Cups on the kitchen's tables") == ["cup", "kitchen_table"]
    assert names("Drinking tea is good. Tea!") == ["drinking_tea", "tea"]
    assert names("He drank tea of mint in the kitchen, in the kitchen") == ["drink_tea_of_mint", "kitchen"]
    assert names("glasses, glass; nothing else") == ["glass"]
    assert names("") == []
    assert Grounder(concepts, longest=1).ground("drinking tea") == [2]


def test_grounding_in_korean() -> None:
    """Nouns with particles, and verbs with endings; a longer noun is not its first syllable."""
    concepts = ["꽃", "흙", "삽", "흙을_파다", "정원", "굽다", "짓다", "마시다", "고르다", "걷다", "만들다", "꽃게"]
    grounder = Grounder(concepts)

    def names(text: str) -> list[str]:
        return [concepts[number] for number in grounder.ground(text)]

    assert names("꽃이 흙에서 자란다.") == ["꽃", "흙"]
    assert names("삽으로 흙을 팠다") == ["삽", "흙을_파다"]
    assert names(unicodedata.normalize("NFD", "정원에서는 꽃들도 삽만으로")) == ["정원", "꽃", "삽"]
    assert names("빵을 구워 집을 지었고 물을 마셨다") == ["굽다", "짓다", "마시다"]
    assert names("고르면 골랐다; 길을 걸어 만든") == ["고르다", "걷다", "만들다"]
    assert names("꽃게는 꽃잎이 아니다") == ["꽃게"]
    assert grounder.ground("입니다") == []


def test_grounding_in_other_scripts() -> None:
    concepts = ["学校", "花", "дом", "straße", "क्षमा", "o'clock"]
    grounder = Grounder(concepts)
    assert grounder.ground("学校で花が咲く") == [0, 1]
    assert grounder.ground("Дом, STRASSE, Straße -- क्षमा! It's 3 o'clock") == [2, 3, 4, 5]


def test_the_shipped_questions_are_about_the_shipped_graph() -> None:
    """Every concept is found, every correct answer has a path to its question, and no thing is in two questions."""
    graph = read_graph(shipped_graph())
    grounder, finder = Grounder(graph.concepts), PathFinder(graph)
    asked = []
    for part in ("train", "dev"):
        examples = read_commonsense(shipped_graph().with_name(f"commonsense-{part}.jsonlines"))
        asked.append({example.id.partition("-")[0] for example in examples})
        for example in examples:
            question = grounder.ground(example.context)
            assert example.id.partition("-")[0] in [graph.concepts[number] for number in question]
            for ending in example.endings:
                assert [graph.concepts[number] for number in grounder.ground(ending)] == [ending.replace(" ", "_")]
            assert example.label is not None
            answer = grounder.ground(example.endings[example.label])[0]
            assert any(finder.find(concept, answer) for concept in question)
    assert not asked[0] & asked[1]


# ---- questions -------------------------------------------------------------------------------------------------------

QUESTION = '{"id": "q", "question": {"stem": "Where?", "choices": [%s]}, "answerKey": "%s"}\n'
CHOICES = '{"label": "A", "text": "here"}, {"label": "B", "text": "there"}'


def test_questions_in_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "dev.jsonl"
    hub = '{"id": "h", "question": "Where?", "choices": {"label": ["A", "B"], "text": ["here", "there"]}}\n'
    path.write_text(QUESTION % (CHOICES, "B") + hub)
    first, second = read_commonsense(path)
    assert (first.context, first.endings, first.label, first.key(1)) == ("Where?", ["here", "there"], 1, "B")
    assert (second.id, second.endings, second.label) == ("h", ["here", "there"], None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a header line and examples, got an empty file"),
        ("{}\n", "line 1: expected an object with 'question' and 'choices' in CommonsenseQA's format"),
        ("[1]\n", "line 1: expected a JSON object"),
        (QUESTION % (CHOICES, "C"), "line 1: expected an answerKey of A, B, got 'C'"),
        (QUESTION % ('{"label": "A", "text": "here"}', "A"), "line 1: expected two choices or more, got 1"),
        (QUESTION % ('{"label": "A", "text": 1}, 2', "A"), "line 1: expected an object with 'question'"),
    ],
)
def test_bad_questions(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "dev.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_commonsense(path)
