"""``GraphReasoner``: KagNet's graph part over a batch of schema graphs (Lin et al., 2019, section 4).

    h_i <- relu(W_self h_i + W mean of h_j over the neighbours j of i + b)          graph convolution, each layer
    p_ijk = LSTM([h; r; h] of each triple of path k between question concept i and answer concept j)
    T_ij = MLP([s; h_i; h_j])                                                       s: the statement's vector
    a_ijk = softmax over k of T_ij W_1 p_ijk,    R_ij = sum over k of a_ijk p_ijk   path level
    b_ij = softmax over i, j of s W_2 T_ij,      g = sum over i, j of b_ij [R_ij; T_ij]   pair level

Nothing is padded: nodes, pairs and paths of all graphs follow one another, and the neighbours' mean of the whole batch
is one sparse product. A pair without a path has R_ij = 0; a graph without pairs has g = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class GraphBatch:
    """The schema graphs of a batch, one after the other. Paths are sorted by length, the longest first."""

    concepts: Tensor  # int64 [N]: the concept of each node
    edges: Tensor  # int64 [2, E]: node and neighbour, in both directions, sorted by node and then by neighbour
    scales: Tensor  # fp32 [E]: 1 / the node's number of neighbours
    pairs: Tensor  # int64 [3, P]: graph, node of the question's concept, node of the answer's
    owners: Tensor  # int64 [K]: the pair of each path
    triples: Tensor  # int64 [3, M]: head node, relation, tail node; all paths' first triples, then their second ones
    steps: tuple[int, ...]  # how many paths have a first triple, a second one, ...; their sum is M
    graphs: int

    def each(self, change: Callable[[Tensor], Tensor]) -> GraphBatch:
        names = ("concepts", "edges", "scales", "pairs", "owners", "triples")
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in names}
        return replace(self, **changed)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> GraphBatch:
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))


class Reasoned(NamedTuple):
    """What a schema graph says, and how much each of its parts counts."""

    vectors: Tensor  # [graphs, output_size]
    path_weights: Tensor  # [K], 1 in sum over the paths of a pair
    pair_weights: Tensor  # [P], 1 in sum over the pairs of a graph


class GraphConvolution(nn.Module):
    """``relu(W_self h_i + W mean of h_j + b)``, j the neighbours of i; without any, the mean is 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own = nn.Linear(width, width)
        self.neighbours = nn.Linear(width, width, bias=False)

    def forward(self, h: Tensor, mean: Tensor) -> Tensor:
        """``h`` [N, C], ``mean`` [N, N] sparse: its rows' neighbours, each over their number."""
        return functional.relu(self.own(h) + self.neighbours(torch.sparse.mm(mean, h)))


class GraphReasoner(nn.Module):
    """From schema graphs and their statements' vectors to one vector a graph.

    Args:
        concepts, relations: The sizes of the vocabularies; relations with their inverses.
        concept_size: The width of concepts and relations.
        statement_size: The width of a statement's vector.
        layers: Graph convolutions.
        path_size: The width of a path's vector, half of it for each direction of the LSTM.
        pair_size: The width of T.
        dropout: In T's layers.
        freeze: Whether concepts and relations keep their vectors.
    """

    def __init__(
        self,
        concepts: int,
        relations: int,
        concept_size: int,
        statement_size: int,
        *,
        layers: int = 2,
        path_size: int = 256,
        pair_size: int = 128,
        dropout: float = 0.1,
        freeze: bool = False,
    ) -> None:
        super().__init__()
        if path_size % 2:
            raise ValueError(f"GraphReasoner: path_size: expected an even number, got {path_size}")
        self.concepts = nn.Embedding(concepts, concept_size).requires_grad_(not freeze)
        self.relations = nn.Embedding(relations, concept_size).requires_grad_(not freeze)
        self.convolutions = nn.ModuleList(GraphConvolution(concept_size) for _ in range(layers))
        self.path_encoder = nn.LSTM(3 * concept_size, path_size // 2, bidirectional=True)
        self.pair_encoder = nn.Sequential(
            nn.Linear(statement_size + 2 * concept_size, 2 * pair_size),
            nn.Dropout(dropout),
            nn.LeakyReLU(),
            nn.Linear(2 * pair_size, pair_size),
            nn.Dropout(dropout),
            nn.LeakyReLU(),
        )
        self.path_query = nn.Linear(pair_size, path_size, bias=False)  # W_1
        self.pair_query = nn.Linear(statement_size, pair_size, bias=False)  # W_2
        self.output_size = path_size + pair_size

    def forward(self, batch: GraphBatch, statements: Tensor) -> Reasoned:
        """``statements`` [graphs, statement_size]. Autocast applies to the path and pair encoders; sums over
        neighbours, paths and pairs keep the parameters' precision."""
        statements = statements.to(self.path_query.weight.dtype)
        h = self.convolved(batch)
        graph, question, answer = batch.pairs
        triples = torch.cat([statements[graph], h[question], h[answer]], -1)
        pairs = self.pair_encoder(triples).to(h.dtype)  # T: [P, pair_size]
        paths = self.path_vectors(batch, h)  # [K, path_size]
        path_scores = (self.path_query(pairs)[batch.owners] * paths).sum(-1)
        path_weights = softmax_of_groups(path_scores, batch.owners, len(pairs))
        relations = sum_of_groups(path_weights[:, None] * paths, batch.owners, len(pairs))  # [P, path_size]
        pair_scores = (self.pair_query(statements)[graph] * pairs).sum(-1)
        pair_weights = softmax_of_groups(pair_scores, graph, batch.graphs)
        both = torch.cat([relations, pairs], -1)
        return Reasoned(sum_of_groups(pair_weights[:, None] * both, graph, batch.graphs), path_weights, pair_weights)

    def convolved(self, batch: GraphBatch) -> Tensor:
        """The nodes' vectors after the convolutions: [N, C]."""
        h: Tensor = self.concepts(batch.concepts)
        size = (len(h), len(h))
        values = batch.scales.to(h.dtype)
        mean = torch.sparse_coo_tensor(batch.edges, values, size, is_coalesced=True, check_invariants=False)
        with torch.autocast(h.device.type, enabled=False):  # a sparse product in bf16 sums in bf16
            for layer in self.convolutions:
                h = layer(h, mean)
        return h

    def path_vectors(self, batch: GraphBatch, h: Tensor) -> Tensor:
        """The last states of both directions of the LSTM over each path's triples: [K, path_size]."""
        head, relation, tail = batch.triples
        if not batch.steps:
            return h.new_zeros(0, self.path_query.out_features)
        triples = torch.cat([h[head], self.relations(relation), h[tail]], -1)
        _, (last, _) = self.path_encoder(PackedSequence(triples, torch.tensor(batch.steps)))
        return torch.cat([last[0], last[1]], -1).to(h.dtype)


def sum_of_groups(rows: Tensor, groups: Tensor, count: int) -> Tensor:
    """The sum of the rows of each group: [count, ...], 0 for groups without rows."""
    return rows.new_zeros(count, *rows.shape[1:]).index_add(0, groups, rows)


def softmax_of_groups(scores: Tensor, groups: Tensor, count: int) -> Tensor:
    """The softmax over the scores of each group: [rows]."""
    with torch.no_grad():
        largest = scores.new_full((count,), -torch.inf).scatter_reduce(0, groups, scores, "amax")
    weights = (scores - largest[groups]).exp()
    return weights / sum_of_groups(weights, groups, count)[groups]
