"""Graphs of concepts: ConceptNet-like edge files, vectors of their concepts, and the paths between two concepts.

An edge file has one edge per line: relation, head, tail and optionally its weight, separated by tabs:
``AtLocation<TAB>cup<TAB>kitchen<TAB>2.0``. Words of a concept are joined by underscores; ConceptNet's own spellings
(``/r/AtLocation``, ``/c/en/cup``) are read too.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fasttfm.data.lines import data_error, read_lines
from fasttfm.models.entity_files import (
    ENTITY_IDS,
    ENTITY_VECTORS,
    RELATION_IDS,
    RELATION_VECTORS,
    read_names,
    read_vectors,
)

Ids = NDArray[np.int64]


class ConceptPath(NamedTuple):
    """A path: ``relations[i]``, which may be an inverse, connects ``concepts[i]`` and ``concepts[i + 1]``."""

    concepts: tuple[int, ...]
    relations: tuple[int, ...]
    score: float = 1.0  # the product of its triples' scores, 1 without vectors


class GraphVectors(NamedTuple):
    """TransE's vectors of a graph, by its numbers: head + relation is near tail."""

    concepts: NDArray[np.float32]  # [concepts, C]
    relations: NDArray[np.float32]  # [relations, C], without inverses


@dataclass(frozen=True, eq=False)
class ConceptGraph:
    """Concepts and the edges between them.

    A relation has two numbers: r from head to tail, and r + len(relations) from tail to head. ``heads``,
    ``relation_ids`` and ``tails`` have every edge in both directions, sorted by head and then by tail. A repeated edge
    has the larger weight.
    """

    concepts: list[str]
    relations: list[str]
    heads: Ids
    relation_ids: Ids
    tails: Ids
    weights: NDArray[np.float32]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The numbers of the concepts."""
        return {concept: number for number, concept in enumerate(self.concepts)}

    @cached_property
    def starts(self) -> Ids:
        """The edges from concept c are those from ``starts[c]`` to ``starts[c + 1]``."""
        return np.searchsorted(self.heads, np.arange(len(self.concepts) + 1)).astype(np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the concepts and relations in their order."""
        return hashlib.sha256("\n".join([*self.concepts, "", *self.relations]).encode()).hexdigest()[:16]

    def neighbours(self, concept: int) -> Ids:
        """The concepts with an edge to this one, each once, in ascending order."""
        tails = self.tails[self.starts[concept] : self.starts[concept + 1]]
        return tails[np.concatenate([[True], tails[1:] != tails[:-1]])] if len(tails) else tails

    def between(self, head: int, tail: int) -> list[tuple[int, float]]:
        """The relations from one concept to another with their weights, the largest first."""
        low, high = self.starts[head], self.starts[head + 1]
        first = low + np.searchsorted(self.tails[low:high], tail)
        last = low + np.searchsorted(self.tails[low:high], tail, side="right")
        order = first + np.argsort(-self.weights[first:last], kind="stable")
        return [(int(self.relation_ids[edge]), float(self.weights[edge])) for edge in order]


# ---- files -----------------------------------------------------------------------------------------------------------


def read_graph(path: str | Path) -> ConceptGraph:
    """The graph of an edge file, which may be compressed (``.gz``). Concepts and relations are numbered as they
    appear."""
    path = Path(path)
    concepts: dict[str, int] = {}
    relations: dict[str, int] = {}
    edges: dict[tuple[int, int, int], float] = {}
    for number, line in read_lines(path):
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) not in (3, 4) or not all(field.strip() for field in fields):
            expected = "relation, head, tail and a weight or none, separated by tabs"
            raise data_error(path, expected, f"{line[:60]!r}", line=number)
        relation, head, tail = fields[0].strip().removeprefix("/r/"), *(concept_name(field) for field in fields[1:3])
        weight = _weight(path, number, fields[3]) if len(fields) == 4 else 1.0
        key = (
            concepts.setdefault(head, len(concepts)),
            relations.setdefault(relation, len(relations)),
            concepts.setdefault(tail, len(concepts)),
        )
        edges[key] = max(weight, edges.get(key, 0.0))
    if not edges:
        raise data_error(path, "edges, one per line", "none")
    return _bidirectional(list(concepts), list(relations), edges)


def concept_name(text: str) -> str:
    """A concept as the graph spells it: lower case, underscores between words, without ConceptNet's path."""
    text = text.strip()
    if text.startswith("/c/"):
        text = text.split("/")[3] if text.count("/") > 2 else text
    return "_".join(text.lower().replace("_", " ").split())


def _weight(path: Path, line: int, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise data_error(path, "a weight from 0 on", repr(text), line=line)
    return weight


def _bidirectional(concepts: list[str], relations: list[str], edges: dict[tuple[int, int, int], float]) -> ConceptGraph:
    rows = np.array(list(edges), dtype=np.int64).reshape(-1, 3)
    weights = np.fromiter(edges.values(), np.float32, len(edges))
    rows, weights = rows[rows[:, 0] != rows[:, 2]], weights[rows[:, 0] != rows[:, 2]]  # no path contains a loop
    back = np.stack([rows[:, 2], rows[:, 1] + len(relations), rows[:, 0]], axis=1)
    rows, weights = np.concatenate([rows, back]), np.concatenate([weights, weights])
    order = np.lexsort((rows[:, 1], rows[:, 2], rows[:, 0]))
    heads, relation_ids, tails = (np.ascontiguousarray(rows[order, column]) for column in range(3))
    return ConceptGraph(concepts, relations, heads, relation_ids, tails, weights[order])


# ---- paths -----------------------------------------------------------------------------------------------------------


class PathFinder:
    """Finds the paths between two concepts.

    Args:
        graph: The graph.
        vectors: The vectors by which paths are scored and pruned (KagNet's section 3.3); without them all scores are 1.
        hops: The maximum number of edges in a path: 1, 2 or 3. The paper's paths have fewer than 5 concepts, so 3.
        least_score: Paths with a lower score are ignored.
        most_paths: The maximum number of paths for a pair; the shortest are kept, and of equally short ones the best.
    """

    def __init__(
        self,
        graph: ConceptGraph,
        vectors: GraphVectors | None = None,
        *,
        hops: int = 3,
        least_score: float = 0.15,
        most_paths: int = 50,
    ) -> None:
        if hops not in (1, 2, 3):
            raise ValueError(f"PathFinder: hops: expected 1, 2 or 3, got {hops}")
        if not 0 <= least_score <= 1:
            raise ValueError(f"PathFinder: least_score: expected a number in [0, 1], got {least_score}")
        if most_paths < 1:
            raise ValueError(f"PathFinder: most_paths: expected 1 or more, got {most_paths}")
        self.graph, self.vectors = graph, vectors
        self.hops, self.least_score, self.most_paths = hops, least_score, most_paths

    def find(self, source: int, target: int) -> list[ConceptPath]:
        """The paths from one concept to another; empty if they are too far apart."""
        best_paths: list[ConceptPath] = []
        for length in range(1, self.hops + 1):
            if len(best_paths) >= self.most_paths:
                break
            paths = [path for concepts in self._concepts(source, target, length) for path in self._labelled(concepts)]
            kept = [path for path in paths if path.score >= self.least_score]
            best_paths += sorted(kept, key=lambda path: -path.score)
        return best_paths[: self.most_paths]

    def _concepts(self, source: int, target: int, length: int) -> Iterator[tuple[int, ...]]:
        """The concepts of every simple path with ``length`` edges."""
        if source == target:
            return
        near = self.graph.neighbours(target)
        if length == 1:
            if _contains(near, source):
                yield source, target
        elif length == 2:
            for middle in np.intersect1d(self.graph.neighbours(source), near, assume_unique=True):
                yield source, int(middle), target
        else:
            for first in self.graph.neighbours(source):
                if first == target:
                    continue
                for second in np.intersect1d(self.graph.neighbours(int(first)), near, assume_unique=True):
                    if second not in (source, first):
                        yield source, int(first), int(second), target

    def _labelled(self, concepts: tuple[int, ...]) -> Iterator[ConceptPath]:
        """The paths over these concepts, one for each choice of relations, the largest weights first."""
        paths = [ConceptPath(concepts[:1], ())]
        for head, tail in itertools.pairwise(concepts):
            steps = self.graph.between(head, tail)[: self.most_paths]
            scored = [(relation, self._score(head, relation, tail)) for relation, _ in steps]
            paths = [
                ConceptPath((*path.concepts, tail), (*path.relations, relation), path.score * score)
                for path in paths
                for relation, score in scored
            ][: self.most_paths]
        yield from paths

    def _score(self, head: int, relation: int, tail: int) -> float:
        """The score of a triple in [0, 1]: the cosine of ``tail - head`` and the relation's vector, mapped to [0,
        1]."""
        if self.vectors is None:
            return 1.0
        count = len(self.graph.relations)
        step = self.vectors.concepts[tail] - self.vectors.concepts[head]
        named = self.vectors.relations[relation % count] * (1 if relation < count else -1)
        length = float(np.linalg.norm(step) * np.linalg.norm(named))
        return (1 + float(step @ named) / length) / 2 if length else 0.5


def _contains(ordered: Ids, value: int) -> bool:
    index = int(np.searchsorted(ordered, value))
    return index < len(ordered) and int(ordered[index]) == value


# ---- schema graphs ---------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A concept of the question and one of the answer, as node numbers, and the paths between them."""

    question: int
    answer: int
    paths: list[ConceptPath]  # with concept numbers


@dataclass(frozen=True)
class SchemaGraph:
    """The part of a graph that connects a question's concepts with an answer's (KagNet's section 3.2).

    Its nodes are the concepts of both and those on the paths between them; its edges are those of the paths and those
    between two concepts of the question or two of the answer.
    """

    concepts: list[int]  # the concept of each node
    edges: list[tuple[int, int]]  # pairs of nodes, each once
    pairs: list[Pair]


def schema_graph(finder: PathFinder, question: Sequence[int], answer: Sequence[int]) -> SchemaGraph:
    """The schema graph of grounded concepts. Pairs without a path are included, with an empty list."""
    nodes: dict[int, int] = {}

    def node(concept: int) -> int:
        return nodes.setdefault(concept, len(nodes))

    edges: set[tuple[int, int]] = set()

    def join(one: int, other: int) -> None:
        low, high = sorted((node(one), node(other)))
        edges.add((low, high))

    for concept in (*question, *answer):
        node(concept)
    pairs = []
    for one in question:
        for other in answer:
            paths = finder.find(one, other)
            pairs.append(Pair(node(one), node(other), paths))
            for path in paths:
                for head, tail in itertools.pairwise(path.concepts):
                    join(head, tail)
    for group in (question, answer):
        for number, one in enumerate(group):
            near = finder.graph.neighbours(one)
            for other in group[number + 1 :]:
                if _contains(near, other):
                    join(one, other)
    return SchemaGraph(list(nodes), sorted(edges), pairs)


# ---- vectors ---------------------------------------------------------------------------------------------------------


def read_graph_vectors(directory: str | Path, graph: ConceptGraph) -> GraphVectors:
    """Reads TransE's vectors of a graph from a directory in OpenKE's format, as ``fasttfm transe`` writes it:
    entity2id.txt, entity2vec.vec, relation2id.txt and relation2vec.vec. Names that the graph does not have are ignored;
    a name of the graph without a vector raises DataError."""
    folder = Path(directory)
    tables = []
    files = ((ENTITY_IDS, ENTITY_VECTORS, graph.concepts), (RELATION_IDS, RELATION_VECTORS, graph.relations))
    for ids, vectors, expected_rows in files:
        names, rows = read_names(folder / ids), read_vectors(folder / vectors).numpy()
        if len(names) != len(rows):
            raise data_error(folder / vectors, f"a vector for each of the {len(names)} names of {ids}", str(len(rows)))
        numbers = {name if ids == RELATION_IDS else concept_name(name): number for number, name in enumerate(names)}
        missing = [name for name in expected_rows if name not in numbers]
        if missing:
            raise data_error(folder / ids, "every name of the graph", f"none for {missing[0]!r}")
        tables.append(rows[[numbers[name] for name in expected_rows]])
    concepts, relations = tables
    if concepts.shape[1] != relations.shape[1]:
        expected = f"vectors of the entities' width {concepts.shape[1]}"
        raise data_error(folder / RELATION_VECTORS, expected, str(relations.shape[1]))
    return GraphVectors(concepts, relations)
