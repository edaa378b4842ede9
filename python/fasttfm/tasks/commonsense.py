"""``CommonsenseTask``: questions whose answers are found with a graph of concepts (KagNet; CommonsenseQA)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasttfm.data.commonsense import CommonsenseExample, read_commonsense
from fasttfm.data.graphs import (
    ConceptGraph,
    ConceptPath,
    GraphVectors,
    PathFinder,
    SchemaGraph,
    read_graph,
    read_graph_vectors,
    schema_graph,
)
from fasttfm.data.grounding import Grounder
from fasttfm.data.lines import DataError
from fasttfm.data.texts import shipped_graph
from fasttfm.models.family import Head
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.nn.graph import GraphBatch
from fasttfm.tasks.inputs import Feature, TaskBatch
from fasttfm.tasks.labels import ChoiceTask
from fasttfm.tasks.metrics import Scores, most_common
from fasttfm.tasks.task import Language, Predictions

REPORTED_PATHS = 3  # per chosen answer, in the file of predictions
FINGERPRINT = "graph_fingerprint"  # the key in config.json that identifies the graph of a model


class WeightedPath(NamedTuple):
    """A path of a schema graph with its attention weight: its pair's weight times its own weight within the pair."""

    weight: float
    path: ConceptPath


@dataclass(frozen=True)
class ChosenAnswer:
    """A question's prediction, and the paths of every choice, sorted by attention weight, the largest first."""

    choice: int
    scores: list[float] = field(default_factory=list)
    paths: list[list[WeightedPath]] = field(default_factory=list)


@dataclass
class GraphFeature(Feature):
    """A question with a schema graph for each choice."""

    graphs: list[SchemaGraph] = field(default_factory=list)


@dataclass
class GraphTaskBatch(TaskBatch):
    """A packed batch with its schema graphs; ``weights`` are the attention weights of paths and pairs, set when the
    model has run."""

    graph: GraphBatch | None = None
    weights: tuple[Tensor, Tensor] | None = None

    def inputs(self) -> dict[str, Any]:
        return {**super().inputs(), "graph": self.graph}

    def _apply(self, change: Callable[[Tensor], Tensor]) -> GraphTaskBatch:
        moved = super()._apply(change)
        assert isinstance(moved, GraphTaskBatch)
        assert self.graph is not None
        return replace(moved, graph=self.graph.each(change))


class CommonsenseTask(ChoiceTask):
    """Chooses one of several answers to a question, by the text and by the paths of a graph that connect the concepts
    of the question with those of the answer.

    Args:
        graph: The edge file (``data.graphs``); by default the graph that is shipped with the sample.
        graph_vectors: A directory with TransE's vectors of the graph (``data.graphs.read_graph_vectors``). Concepts
            keep these vectors, and paths are pruned by them. By default the vectors are random and trained with the
            model, and no path is pruned.
        path_score: With ``graph_vectors``, paths with a lower TransE score are ignored; 0.15 by default.
        path_length: The maximum number of edges in a path.
        max_paths: The maximum number of paths for a pair of concepts.
    """

    name = "commonsense"
    distills = False
    about = "the correct answer, with a graph"
    file_format = "CommonsenseQA's jsonl, and --graph"
    read_file = staticmethod(read_commonsense)
    head = Head.GRAPH_CHOICE
    options = ("graph", "graph_vectors", "path_score", "path_length", "max_paths")
    kept = options

    def __init__(
        self,
        language: Language,
        train: Sequence[Any] | None,
        *,
        graph: str | Path | None = None,
        graph_vectors: str | Path | None = None,
        path_score: float | None = None,
        path_length: int = 3,
        max_paths: int = 50,
        **options: Any,
    ) -> None:
        super().__init__(language, train, **options)
        self.path = shipped_graph() if graph is None else Path(graph)
        self.graph = read_graph(self.path)
        self.vectors: GraphVectors | None = None
        self.vectors_path = None if graph_vectors is None else Path(graph_vectors)
        if self.vectors_path is not None:
            self.vectors = read_graph_vectors(self.vectors_path, self.graph)
        elif path_score is not None:
            raise ValueError("path_score: expected with graph_vectors, by which paths are scored")
        least_score = 0.15 if path_score is None else path_score
        self.finder = PathFinder(
            self.graph, self.vectors, hops=path_length, least_score=least_score, most_paths=max_paths
        )
        self.grounder = Grounder(self.graph.concepts)
        self._known: dict[tuple[str, str], SchemaGraph] = {}

    def configuration(self) -> dict[str, Any]:
        sizes = {"graph_concepts": len(self.graph.concepts), "graph_relations": 2 * len(self.graph.relations)}
        if self.vectors is None:
            return sizes
        return {**sizes, "concept_size": self.vectors.concepts.shape[1], "freeze_concepts": True}

    def adjust(self, model: PretrainedModel) -> None:
        """Copies the graph's vectors to the model, and writes the graph's fingerprint into its configuration."""
        super().adjust(model)
        extra = model.config.extra
        if extra.setdefault(FINGERPRINT, self.graph.fingerprint) != self.graph.fingerprint:
            expected = "the graph that the model was trained with"
            raise DataError(f"{self.path}: expected {expected}, got one with other concepts or relations")
        if self.vectors is not None:
            tables: Any = model.get_submodule("graph")
            with torch.no_grad():
                tables.concepts.weight.copy_(torch.from_numpy(self.vectors.concepts))
                relations = torch.from_numpy(self.vectors.relations)
                tables.relations.weight.copy_(torch.cat([relations, -relations]))

    def description(self) -> dict[str, Any]:
        vectors = None if self.vectors_path is None else str(self.vectors_path.resolve())
        return {
            **super().description(),
            "graph": str(self.path.resolve()),
            "graph_vectors": vectors,
            "path_score": None if self.vectors is None else self.finder.least_score,
            "path_length": self.finder.hops,
            "max_paths": self.finder.most_paths,
        }

    # ---- examples in -------------------------------------------------------------------------------------------------

    def features(self, examples: Sequence[Any]) -> list[Feature]:
        return [
            GraphFeature(
                feature.example,
                feature.sequences,
                feature.target,
                [self.schema(example.context, answer) for answer in example.endings],
            )
            for example, feature in zip(examples, super().features(examples), strict=True)
        ]

    def remark(self, features: Sequence[Feature]) -> str | None:
        """How many questions no path of the graph connects with any of their answers."""
        graphs = [feature.graphs for feature in features if isinstance(feature, GraphFeature)]
        without = sum(not any(pair.paths for graph in choices for pair in graph.pairs) for choices in graphs)
        said = f"{without} of {len(graphs)} questions have no path in the graph to any of their answers"
        if without < len(graphs):
            return said
        return f"{said}; are the concepts of {self.path} in the language of the questions?"

    def schema(self, question: str, answer: str) -> SchemaGraph:
        """The schema graph of a question and an answer. Concepts in both are only the answer's."""
        key = (question, answer)
        if key not in self._known:
            answers = self.grounder.ground(answer)
            questions = [concept for concept in self.grounder.ground(question) if concept not in answers]
            self._known[key] = schema_graph(self.finder, questions, answers)
        return self._known[key]

    def batch(self, features: Sequence[Feature]) -> TaskBatch:
        plain = super().batch(features)
        values = {field.name: getattr(plain, field.name) for field in fields(plain)}
        graphs = [graph for feature in features if isinstance(feature, GraphFeature) for graph in feature.graphs]
        return GraphTaskBatch(**values, graph=collate_graphs(graphs))

    # ---- answers out -------------------------------------------------------------------------------------------------

    def _called(self, model: Any, batch: TaskBatch, targets: dict[str, Tensor], choices: int | None) -> Any:
        output = super()._called(model, batch, targets, choices)
        assert isinstance(batch, GraphTaskBatch)
        batch.weights = (output.path_weights, output.pair_weights)
        return output

    def read(self, batch: TaskBatch, logits: Tensor) -> list[Any]:
        assert isinstance(batch, GraphTaskBatch)
        paths = iter(weighted_paths(batch))
        counts = [len(feature.sequences) for feature in batch.features]
        return [
            ChosenAnswer(int(row.argmax()), row[:count].tolist(), [next(paths) for _ in range(count)])
            for row, count in zip(logits.float().cpu(), counts, strict=True)
        ]

    def predictions(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> Predictions:
        return list(read)

    def results(self, examples: Sequence[Any], features: Sequence[Feature], read: Sequence[Any]) -> list[Any]:
        return super().results(examples, features, [np.array(answer.scores) for answer in read])

    def prediction(self, result: Any) -> Any:
        return ChosenAnswer(result.choice)

    def scores(self, examples: Sequence[Any], predictions: Predictions) -> Scores:
        return super().scores(examples, [answer.choice for answer in predictions])

    def majority(self, train: Sequence[Any], examples: Sequence[Any]) -> Predictions:
        return [ChosenAnswer(most_common(example.label for example in train))] * len(examples)

    def files(self, examples: Sequence[Any], predictions: Predictions) -> dict[str, str]:
        """A line for each question: its id, the key of the chosen answer, and the paths with the largest weights."""
        rows = [self._row(example, answer) for example, answer in zip(examples, predictions, strict=True)]
        return {"predictions.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)}

    def _row(self, example: CommonsenseExample, answer: ChosenAnswer) -> dict[str, Any]:
        best = answer.paths[answer.choice][:REPORTED_PATHS] if answer.paths else []
        paths = [{"weight": round(weight, 4), "path": path_text(self.graph, path)} for weight, path in best]
        return {"id": example.id, "answerKey": example.key(answer.choice), "paths": paths}


# ---- batches of graphs -----------------------------------------------------------------------------------------------


def collate_graphs(graphs: Sequence[SchemaGraph]) -> GraphBatch:
    """Concatenates the schema graphs of a batch."""
    concepts: list[int] = []
    edges: list[tuple[int, int]] = []
    pairs: list[tuple[int, int, int]] = []
    paths: list[tuple[int, list[tuple[int, int, int]]]] = []  # the pair of each path, and the path's triples
    for number, graph in enumerate(graphs):
        first = len(concepts)
        nodes = {concept: first + node for node, concept in enumerate(graph.concepts)}
        concepts += graph.concepts
        edges += [(first + a, first + b) for one, other in graph.edges for a, b in ((one, other), (other, one))]
        for pair in graph.pairs:
            paths += [(len(pairs), _triples(path, nodes)) for path in pair.paths]
            pairs.append((number, first + pair.question, first + pair.answer))
    paths.sort(key=lambda path: -len(path[1]))
    longest = len(paths[0][1]) if paths else 0
    by_step = [[triples[step] for _, triples in paths if len(triples) > step] for step in range(longest)]
    edges.sort()
    triples = [triple for triples in by_step for triple in triples]
    owners = [owner for owner, _ in paths]
    batch: GraphBatch = GraphBatch.of(concepts, edges, pairs, owners, triples, list(map(len, by_step)), len(graphs))
    return batch


def _triples(path: ConceptPath, nodes: dict[int, int]) -> list[tuple[int, int, int]]:
    ends = [nodes[concept] for concept in path.concepts]
    return list(zip(ends, path.relations, ends[1:], strict=False))


def weighted_paths(batch: GraphTaskBatch) -> list[list[WeightedPath]]:
    """Each graph's paths with their weights, the largest first."""
    assert batch.weights is not None
    path_weights, pair_weights = (weights.float().cpu() for weights in batch.weights)
    graphs = [graph for feature in batch.features if isinstance(feature, GraphFeature) for graph in feature.graphs]
    paths = [(number, path) for number, graph in enumerate(graphs) for pair in graph.pairs for path in pair.paths]
    assert batch.graph is not None
    owners = batch.graph.owners.cpu()
    # The batch has the paths sorted by length, the longest first, by a stable sort.
    order = sorted(range(len(paths)), key=lambda index: -len(paths[index][1].relations))
    weighted: list[list[WeightedPath]] = [[] for _ in graphs]
    for place, index in enumerate(order):
        number, path = paths[index]
        weight = float(path_weights[place] * pair_weights[owners[place]])
        weighted[number].append(WeightedPath(weight, path))
    return [sorted(some, key=lambda path: -path.weight) for some in weighted]


# ---- text ------------------------------------------------------------------------------------------------------------


def path_text(graph: ConceptGraph, path: ConceptPath) -> str:
    """A path as a line: ``cup --AtLocation--> kitchen <--AtLocation-- knife``."""
    text = graph.concepts[path.concepts[0]]
    count = len(graph.relations)
    for relation, concept in zip(path.relations, path.concepts[1:], strict=True):
        name = graph.relations[relation % count]
        arrow = f"--{name}-->" if relation < count else f"<--{name}--"
        text += f" {arrow} {graph.concepts[concept]}"
    return text
