"""GraphReasoner against KagNet's equations, written per graph and per path in plain torch, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm.data.graphs import ConceptPath, Pair, SchemaGraph
from fasttfm.nn.graph import GraphReasoner, Slots
from fasttfm.tasks.commonsense import collate_graphs

CONCEPTS, RELATIONS = 9, 4
# Sums of at most a few hundred products: their rounding errors in fp64 are far below this.
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def path(*steps: int) -> ConceptPath:
    """Concept, relation, concept, relation, ..."""
    return ConceptPath(steps[::2], steps[1::2])


@pytest.fixture(scope="module")
def graphs() -> list[SchemaGraph]:
    """Graphs with paths of one, two and three edges, with pairs without a path, without pairs, and without concepts."""
    first = SchemaGraph(
        [0, 1, 2, 3, 4],
        [(0, 1), (1, 2), (0, 3), (3, 4), (2, 4)],
        [
            Pair(0, 2, [path(0, 1, 1, 2, 2), path(0, 0, 3, 1, 4, 3, 2)]),
            Pair(0, 4, [path(0, 0, 3, 1, 4)]),
            Pair(1, 2, [path(1, 2, 2), path(1, 0, 2), path(1, 3, 0, 0, 3, 2, 4)]),
            Pair(1, 4, []),
        ],
    )
    return [
        first,
        SchemaGraph([7, 8], [], [Pair(0, 1, [])]),
        SchemaGraph([5], [], []),
        SchemaGraph([], [], []),
        SchemaGraph([6, 2], [(0, 1)], [Pair(0, 1, [path(6, 1, 2)])]),
    ]


@pytest.fixture
def reasoner() -> GraphReasoner:
    torch.manual_seed(0)
    module = GraphReasoner(CONCEPTS, RELATIONS, 6, 10, layers=2, path_size=8, pair_size=5, dropout=0.0)
    return module.double()


# ---- the paper's equations -------------------------------------------------------------------------------------------


def lstm(cell: nn.LSTM, rows: list[Tensor], suffix: str) -> Tensor:
    """The last hidden state of one direction."""
    size = cell.hidden_size
    h, c = (rows[0].new_zeros(size) for _ in range(2))
    weights = [getattr(cell, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    for x in rows:
        gates = weights[0] @ x + weights[2] + weights[1] @ h + weights[3]
        i, f, g, o = gates.split(size)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h


def convolved(reasoner: GraphReasoner, graph: SchemaGraph) -> list[Tensor]:
    h = [reasoner.concepts.weight[concept] for concept in graph.concepts]
    for layer in reasoner.convolutions:
        after = []
        for i, own in enumerate(h):
            near = [h[b if a == i else a] for a, b in graph.edges if i in (a, b)]
            total = layer.own.weight @ own + layer.own.bias
            if near:
                total = total + sum(layer.neighbours.weight @ other / len(near) for other in near)
            after.append(functional.relu(total))
        h = after
    return h


def reference(reasoner: GraphReasoner, graph: SchemaGraph, s: Tensor) -> Tensor:
    """g of one graph."""
    h = convolved(reasoner, graph)
    nodes = {concept: node for node, concept in enumerate(graph.concepts)}
    path_size, pair_size = reasoner.path_query.out_features, reasoner.path_query.in_features
    rows, scores = [], []
    for pair in graph.pairs:
        t = torch.cat([s, h[pair.question], h[pair.answer]])
        for number in (0, 3):
            layer = reasoner.pair_encoder[number]
            t = functional.leaky_relu(layer.weight @ t + layer.bias)
        r = s.new_zeros(path_size)
        if pair.paths:
            encoded = []
            for each in pair.paths:
                ends = [h[nodes[concept]] for concept in each.concepts]
                triples = [
                    torch.cat([head, reasoner.relations.weight[relation], tail])
                    for head, relation, tail in zip(ends, each.relations, ends[1:], strict=False)
                ]
                backward = lstm(reasoner.path_encoder, triples[::-1], "_reverse")
                encoded.append(torch.cat([lstm(reasoner.path_encoder, triples, ""), backward]))
            alpha = torch.stack([(reasoner.path_query.weight @ t) @ p for p in encoded]).softmax(0)
            r = sum(a * p for a, p in zip(alpha, encoded, strict=True))
        rows.append(torch.cat([r, t]))
        scores.append((reasoner.pair_query.weight @ s) @ t)
    if not rows:
        return s.new_zeros(path_size + pair_size)
    return torch.stack(scores).softmax(0) @ torch.stack(rows)


# ---- tests -----------------------------------------------------------------------------------------------------------


def check_vectors_and_gradients(reasoner: GraphReasoner, graphs: list[SchemaGraph], device: str = "cpu") -> None:
    statements = torch.randn(len(graphs), 10, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(len(graphs), reasoner.output_size, dtype=torch.float64)
    expected = torch.stack([reference(reasoner, graph, s) for graph, s in zip(graphs, statements, strict=True)])

    def gradients(vectors: Tensor) -> tuple[Tensor, ...]:
        trained = [statements, *(parameter for parameter in reasoner.parameters() if parameter.requires_grad)]
        return torch.autograd.grad((vectors.cpu() * upstream).sum(), trained, materialize_grads=True)

    theirs = gradients(expected)
    reasoner.to(device)
    found = reasoner(collate_graphs(graphs).to(device), statements.to(device)).vectors
    torch.testing.assert_close(found.cpu(), expected, **EXACT)
    for mine, other in zip(gradients(found), theirs, strict=True):
        torch.testing.assert_close(mine.cpu(), other, **EXACT)


def test_vectors_and_gradients(reasoner: GraphReasoner, graphs: list[SchemaGraph]) -> None:
    check_vectors_and_gradients(reasoner, graphs)


@pytest.mark.gpu
def test_vectors_and_gradients_on_a_gpu(reasoner: GraphReasoner, graphs: list[SchemaGraph]) -> None:
    check_vectors_and_gradients(reasoner, graphs, "cuda")


def test_vectors_and_gradients_of_paths_with_one_edge(reasoner: GraphReasoner, graphs: list[SchemaGraph]) -> None:
    check_vectors_and_gradients(reasoner, graphs[3:])


def test_vectors_and_gradients_with_frozen_concepts(reasoner: GraphReasoner, graphs: list[SchemaGraph]) -> None:
    for table in (reasoner.concepts, reasoner.relations):
        table.requires_grad_(False)
    check_vectors_and_gradients(reasoner, graphs)


def test_gradients_of_biases_have_their_own_memory(reasoner: GraphReasoner, graphs: list[SchemaGraph]) -> None:
    """The two biases of a direction have equal gradients. If these shared their memory, clipping would scale it
    twice."""
    reasoner(collate_graphs(graphs), torch.randn(len(graphs), 10, dtype=torch.float64)).vectors.sum().backward()
    lstm = reasoner.path_encoder
    one, other = lstm.bias_ih_l0.grad, lstm.bias_hh_l0.grad
    assert one.equal(other)
    one.zero_()
    assert bool(other.any())


def test_the_backward_of_statements_is_before_that_of_paths(reasoner: GraphReasoner, graphs: list[SchemaGraph]) -> None:
    batch, order = collate_graphs(graphs), []
    texts = torch.randn(len(graphs), 10, dtype=torch.float64, requires_grad=True)
    parameters = {
        "statements": texts,
        "paths": reasoner.path_encoder.weight_ih_l0,
        "nodes": reasoner.convolutions[0].own.weight,
    }
    for name, parameter in parameters.items():
        parameter.register_hook(lambda _, name=name: order.append(name))
    reasoner(batch, texts * 2).vectors.sum().backward()
    assert order == ["statements", "paths", "nodes"]


@pytest.mark.parametrize("change", ["neighbours", "path_query", "pair_query", "reverse"])
def test_a_broken_part_is_detected(reasoner: GraphReasoner, graphs: list[SchemaGraph], change: str) -> None:
    statements = torch.randn(len(graphs), 10, dtype=torch.float64)
    expected = torch.stack([reference(reasoner, graph, s) for graph, s in zip(graphs, statements, strict=True)])
    broken = {
        "neighbours": reasoner.convolutions[1].neighbours.weight,
        "path_query": reasoner.path_query.weight,
        "pair_query": reasoner.pair_query.weight,
        "reverse": reasoner.path_encoder.weight_hh_l0_reverse,
    }[change]
    with torch.no_grad():
        broken += 0.01
        found = reasoner(collate_graphs(graphs), statements).vectors
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, expected, **EXACT)


def test_defaults_without_paths_or_pairs(reasoner: GraphReasoner, graphs: list[SchemaGraph]) -> None:
    """A pair without a path has R = 0, a graph without pairs g = 0, and both stay finite in the backward."""
    statements = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    found = reasoner(collate_graphs(graphs[1:4]), statements)
    assert found.path_weights.shape == (0,)
    assert found.pair_weights.tolist() == [1.0]
    paths = reasoner.path_query.out_features
    assert found.vectors[0, :paths].abs().sum() == 0
    assert found.vectors[0, paths:].abs().sum() > 0
    assert found.vectors[1:].abs().sum() == 0
    found.vectors.sum().backward()
    assert bool(statements.grad.isfinite().all())  # type: ignore[union-attr]


def test_weights_of_paths_and_pairs(reasoner: GraphReasoner, graphs: list[SchemaGraph]) -> None:
    batch = collate_graphs(graphs)
    assert batch.steps == (7, 4, 2)
    assert batch.edges[:, batch.edges[0].argsort(stable=True)].equal(batch.edges)
    found = reasoner(batch, torch.randn(len(graphs), 10, dtype=torch.float64))
    sums = torch.zeros(batch.pairs.shape[1], dtype=torch.float64).index_add(0, batch.owners, found.path_weights)
    assert sums.tolist() == pytest.approx([1, 1, 1, 0, 0, 1])
    sums = torch.zeros(5, dtype=torch.float64).index_add(0, batch.pairs[0], found.pair_weights)
    assert sums.tolist() == pytest.approx([1, 1, 0, 0, 1])


def test_slots_hold_the_members_of_each_group() -> None:
    slots = Slots.of([2, 0, 2, 2, 0], 4)
    assert slots.members.tolist() == [[1, 4, 5], [5, 5, 5], [0, 2, 3], [5, 5, 5]]
    assert (slots.scores.squeeze(1) < 0).equal(slots.members == 5)
    assert slots.slot_of_member.tolist() == [6, 0, 7, 8, 1]
    assert Slots.of([], 2).members.tolist() == [[0], [0]]


def test_softmaxes_of_large_scores_are_finite(reasoner: GraphReasoner, graphs: list[SchemaGraph]) -> None:
    with torch.no_grad():
        reasoner.path_query.weight *= 1e6
        reasoner.pair_query.weight *= 1e6
    found = reasoner(collate_graphs(graphs), torch.randn(len(graphs), 10, dtype=torch.float64))
    assert bool(found.vectors.isfinite().all())
    found.vectors.sum().backward()
    assert all(bool(each.grad.isfinite().all()) for each in reasoner.parameters())  # type: ignore[union-attr]


def test_a_batch_without_concepts(reasoner: GraphReasoner) -> None:
    found = reasoner(collate_graphs([SchemaGraph([], [], [])] * 2), torch.randn(2, 10, dtype=torch.float64))
    assert found.vectors.shape == (2, reasoner.output_size)
    assert not found.vectors.any()


def test_autocast_keeps_sums_in_the_precision_of_the_parameters(
    reasoner: GraphReasoner, graphs: list[SchemaGraph]
) -> None:
    module, batch = reasoner.float(), collate_graphs(graphs)
    statements = torch.randn(len(graphs), 10)
    expected = module(batch, statements)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = module(batch, statements.bfloat16())
    assert all(part.dtype == torch.float32 for part in found)
    # A few layers one after another, each rounded to bf16's 8 bits.
    torch.testing.assert_close(found.vectors, expected.vectors, rtol=2**-4, atol=2**-5)
    found.vectors.sum().backward()
