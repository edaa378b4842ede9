"""``GraphReasoner``: KagNet's graph part over a batch of schema graphs (Lin et al., 2019, section 4).

    h_i <- relu(W_self h_i + W mean of h_j over the neighbours j of i + b)          graph convolution, each layer
    p_ijk = LSTM([h; r; h] of each triple of path k between question concept i and answer concept j)
    T_ij = MLP([s; h_i; h_j])                                                       s: the statement's vector
    a_ijk = softmax over k of T_ij W_1 p_ijk,    R_ij = sum over k of a_ijk p_ijk   path level
    b_ij = softmax over i, j of s W_2 T_ij,      g = sum over i, j of b_ij [R_ij; T_ij]   pair level

Nodes and triples of all graphs are concatenated; the paths of a pair and the pairs of a graph are padded for the two
softmaxes. A pair without a path has R_ij = 0; a graph without pairs has g = 0. Indices that depend only on the graphs'
structure are computed on the CPU with the batch, so that nothing here synchronizes with the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

_SUM = 0  # embedding_bag's code of the mode "sum"
_NO_MEMBER = -1e30  # finite, so that groups without members have finite weights


class Rows(NamedTuple):
    """Rows of a tensor to gather, and an order in which their gradients are summed without atomics."""

    rows: Tensor  # int64 [n]
    order: Tensor  # int64 [n]: the indices that sort ``rows``
    starts: Tensor  # int64 [rows + 1]: where each row starts in ``order``

    @staticmethod
    def of(index: Any, count: int) -> Rows:
        """The rows ``index`` of a tensor with ``count`` rows."""
        index = np.asarray(index, dtype=np.int64).flatten()
        ends = np.cumsum(np.bincount(index, minlength=count))
        starts = np.concatenate([np.zeros(1, dtype=np.int64), ends])
        return Rows(*map(torch.from_numpy, (index, np.argsort(index, kind="stable"), starts)))

    def gather(self, x: Tensor) -> Tensor:
        """``x[rows]``"""
        return cast("Tensor", _Gather.apply(x, *self))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(order, starts)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _sums(dy.contiguous(), *ctx.saved_tensors), None, None, None


def _sums(rows: Tensor, order: Tensor, starts: Tensor, scales: Tensor | None = None) -> Tensor:
    """The sums of the rows ``order[starts[i]:starts[i + 1]]``, each multiplied by its scale."""
    if not len(order):
        return rows.new_zeros(len(starts) - 1, rows.shape[1])
    return torch.embedding_bag(rows, order, starts, False, _SUM, False, scales, True)[0]


class Slots(NamedTuple):
    """Members of groups, padded to the size of the largest group."""

    members: Tensor  # int64 [groups, size], padded with the number of members
    scores: Tensor  # fp32 [groups, 1, size]: an additive mask for a softmax, 0 for members
    slot_of_member: Tensor  # int64 [members]: the index of each member in the flattened slots

    @staticmethod
    def of(groups: Any, count: int) -> Slots:
        """The slots for the group of each member; there are ``count`` groups."""
        groups = np.asarray(groups, dtype=np.int64)
        order = np.argsort(groups, kind="stable")
        sizes = np.bincount(groups, minlength=count)
        size = max(1, int(sizes.max(initial=0)))
        slot_of_member = np.empty_like(groups)
        slot_of_member[order] = np.arange(len(groups)) + np.repeat(
            np.arange(count) * size - (np.cumsum(sizes) - sizes), sizes
        )
        members = np.full(count * size, len(groups), dtype=np.int64)
        members[slot_of_member] = np.arange(len(groups))
        found = torch.from_numpy(members).view(count, size)
        scores = torch.zeros(count, 1, size).masked_fill((found == len(groups)).unsqueeze(1), _NO_MEMBER)
        return Slots(found, scores, torch.from_numpy(slot_of_member))


@dataclass(frozen=True)
class GraphBatch:
    """The concatenated schema graphs of a batch. Paths are sorted by length, the longest first."""

    concepts: Tensor  # int64 [N]: the concept of each node
    edges: Tensor  # int64 [2, E]: node and neighbour, in both directions, sorted by node and then by neighbour
    scales: Tensor  # fp32 [2, E]: 1 / the number of neighbours of the node and of the neighbour
    starts: Tensor  # int64 [N + 1]: the first edge of each node
    pairs: Tensor  # int64 [3, P]: graph, node of the question's concept, node of the answer's
    ends: Tensor  # int64 [2 P]: the two nodes of each pair
    owners: Tensor  # int64 [K]: the pair of each path
    triples: Rows  # 3 M: head node, N + relation, tail node; all paths' first triples, then their second ones
    gates: Rows  # 2 M: for each step of the LSTM, direction and path, 2 * the triple's number + the direction
    path_slots: Slots  # the paths of each pair
    path_rows: Rows  # their last states, of both directions
    pair_slots: Slots  # the pairs of each graph
    steps: tuple[int, ...]  # how many paths have a first triple, a second one, ...; their sum is M
    graphs: int

    @staticmethod
    def of(concepts: Any, edges: Any, pairs: Any, owners: Any, triples: Any, steps: Sequence[int], graphs: int) -> Any:
        """A batch from arrays: ``concepts`` [N], ``edges`` [E, 2], ``pairs`` [P, 3], ``owners`` [K], ``triples`` [M, 3]
        of head, relation and tail, and ``steps`` as above."""
        nodes, numbers = len(concepts), np.asarray
        edges = numbers(edges, dtype=np.int64).reshape(-1, 2)
        pairs = numbers(pairs, dtype=np.int64).reshape(-1, 3)
        triples = numbers(triples, dtype=np.int64).reshape(-1, 3)
        degrees = np.bincount(edges[:, 0], minlength=nodes)
        paths = Slots.of(owners, len(pairs))
        rows = len(owners) + 1  # the last states of a direction, followed by a row of zeros
        either = np.stack([paths.members.numpy(), paths.members.numpy() + rows], -1)
        relations = triples[:, 1].max(initial=-1) + 1
        return GraphBatch(
            concepts=torch.from_numpy(numbers(concepts, dtype=np.int64)),
            edges=torch.from_numpy(edges.T.copy()),
            scales=torch.from_numpy((1 / degrees[edges].T).astype(np.float32)),
            starts=torch.from_numpy(np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)),
            pairs=torch.from_numpy(pairs.T.copy()),
            ends=torch.from_numpy(pairs[:, 1:].flatten()),
            owners=torch.from_numpy(numbers(owners, dtype=np.int64)),
            triples=Rows.of(triples + np.array([0, nodes, 0]), nodes + relations),
            gates=Rows.of(_gates(steps), 2 * len(triples)),
            path_slots=paths,
            path_rows=Rows.of(either, 2 * rows),
            pair_slots=Slots.of(pairs[:, 0], graphs),
            steps=tuple(steps),
            graphs=graphs,
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> GraphBatch:
        changed: dict[str, Any] = {}
        for name, value in ((each.name, getattr(self, each.name)) for each in fields(self)):
            if isinstance(value, Tensor):
                changed[name] = change(value)
            elif isinstance(value, (Rows, Slots)):
                changed[name] = type(value)(*map(change, value))
        return replace(self, **changed)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> GraphBatch:
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))


def _gates(steps: Sequence[int]) -> Any:
    """``GraphBatch.gates``: the first direction reads a path's triples in order, the second in reverse order."""
    counts = np.array(steps, dtype=np.int64)
    starts, paths = np.cumsum(counts) - counts, np.arange(max(steps, default=0))
    lengths = (counts[:, None] > paths).sum(0)
    found = [np.empty(0, dtype=np.int64)]
    for step, count in enumerate(steps):
        own = paths[:count]
        found += [2 * (starts[step] + own), 2 * (starts[lengths[own] - 1 - step] + own) + 1]
    return np.concatenate(found)


class Reasoned(NamedTuple):
    """The vectors of schema graphs, and the attention weights of their paths and pairs."""

    vectors: Tensor  # [graphs, output_size]
    path_weights: Tensor  # [K]; the sum over the paths of a pair is 1
    pair_weights: Tensor  # [P]; the sum over the pairs of a graph is 1


class EncodedGraphs(NamedTuple):
    """The vectors of nodes [N, C] and of paths, in the slots of their pairs [P, size, path_size]."""

    nodes: Tensor
    paths: Tensor


class GraphConvolution(nn.Module):
    """``relu(W_self h_i + W mean of h_j + b)`` over the neighbours j of i; without neighbours the mean is 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own = nn.Linear(width, width)
        self.neighbours = nn.Linear(width, width, bias=False)

    def forward(self, h: Tensor, batch: GraphBatch) -> Tensor:
        """``h`` [N, C]"""
        return torch.addmm(self.own(h), neighbour_mean(h, batch), self.neighbours.weight.t()).relu()


def neighbour_mean(h: Tensor, batch: GraphBatch) -> Tensor:
    """The mean of the rows ``h`` [N, C] of each node's neighbours; 0 without neighbours."""
    return cast("Tensor", _NeighbourMean.apply(h, batch.edges[1], batch.starts, batch.scales.to(h.dtype)))


class _NeighbourMean(torch.autograd.Function):
    """The mean of the neighbours' rows: a gather and a sum in one kernel. The graph is symmetric, so the gradient is
    the sum of the neighbours' gradients, each divided by the neighbour's own number of neighbours."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, neighbours: Tensor, starts: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(neighbours, starts, scales)
        return _sums(h, neighbours, starts, scales[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        neighbours, starts, scales = ctx.saved_tensors
        return _sums(dy.contiguous(), neighbours, starts, scales[1]), None, None, None


class GraphReasoner(nn.Module):
    """Computes one vector per schema graph from the graphs and the vectors of their statements.

    Args:
        concepts, relations: The sizes of the vocabularies; relations include inverses.
        concept_size: The width of concepts and relations.
        statement_size: The width of a statement's vector.
        layers: The number of graph convolutions.
        path_size: The width of a path's vector, half of it for each direction of the LSTM.
        pair_size: The width of T.
        dropout: The dropout probability in T's layers.
        freeze: Whether the vectors of concepts and relations are not trained.
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

    def forward(self, batch: GraphBatch, statements: Tensor, encoded: EncodedGraphs | None = None) -> Reasoned:
        """``statements`` [graphs, statement_size]; ``encoded`` is ``encode(batch)``, if it was called before. Autocast
        applies only to the path encoder; the other parts are small, and use the parameters' precision."""
        h, paths = self.encode(batch) if encoded is None else encoded
        with torch.autocast(statements.device.type, enabled=False):
            return self._attended(batch, statements.to(h.dtype), h, paths.to(h.dtype))

    def encode(self, batch: GraphBatch) -> EncodedGraphs:
        """The vectors that do not depend on statements. Autograd runs the nodes of a backward in the reverse order of
        the forward. If this runs before the statements' encoder, its many small kernels are launched after the
        encoder's backward, while the GPU is busy with that."""
        with torch.autocast(batch.concepts.device.type, enabled=False):
            h = self.convolved(batch)
        return EncodedGraphs(h, self.path_vectors(batch, h))

    def _attended(self, batch: GraphBatch, statements: Tensor, h: Tensor, paths: Tensor) -> Reasoned:
        """Both levels of attention."""
        ends = h.index_select(0, batch.ends).view(-1, 2 * h.shape[1])
        pairs = self.pair_encoder(torch.cat([statements.index_select(0, batch.pairs[0]), ends], -1))  # T
        path_weights = _softmax(paths, self.path_query(pairs), batch.path_slots)  # [P, 1, size]
        relations = (path_weights @ paths).squeeze(1)  # R: [P, path_size]
        both = functional.pad(torch.cat([relations, pairs], -1), (0, 0, 0, 1))  # a row of zeros for missing pairs
        members = batch.pair_slots.members
        both = both.index_select(0, members.flatten()).view(*members.shape, self.output_size)
        query = self.pair_query(statements)
        pair_weights = _softmax(both[..., -query.shape[1] :], query, batch.pair_slots)  # [graphs, 1, size]
        found = (pair_weights, batch.pair_slots), (path_weights, batch.path_slots)
        of_pairs, of_paths = (weights.flatten().index_select(0, slots.slot_of_member) for weights, slots in found)
        return Reasoned((pair_weights @ both).squeeze(1), of_paths, of_pairs)

    def convolved(self, batch: GraphBatch) -> Tensor:
        """The nodes' vectors after the convolutions: [N, C]."""
        h: Tensor = self.concepts(batch.concepts)
        for layer in self.convolutions:
            h = layer(h, batch)
        return h

    def path_vectors(self, batch: GraphBatch, h: Tensor) -> Tensor:
        """The last states of both directions of the LSTM over each path's triples, in the slots of their pairs, padded
        with 0: [P, size, path_size]."""
        lstm: Any = self.path_encoder
        size, slots = lstm.hidden_size, batch.path_slots.members.shape
        if not batch.steps:
            return h.new_zeros(*slots, 2 * size)
        used = len(batch.triples.starts) - 1 - len(h)
        triples = batch.triples.gather(torch.cat([h, self.relations.weight[:used]])).view(-1, lstm.input_size)
        weights = torch.cat([lstm.weight_ih_l0, lstm.weight_ih_l0_reverse])
        biases = [lstm.bias_ih_l0, lstm.bias_ih_l0_reverse, lstm.bias_hh_l0, lstm.bias_hh_l0_reverse]
        gates = functional.linear(triples, weights, torch.cat(biases).view(2, -1).sum(0)).view(-1, 4 * size)
        gates = batch.gates.gather(gates)  # [2, paths of a step] rows for each step
        states = _last_states(gates, torch.stack([lstm.weight_hh_l0, lstm.weight_hh_l0_reverse]).mT, batch.steps)
        return batch.path_rows.gather(states.view(-1, size)).view(*slots, 2 * size)


def _last_states(gates: Tensor, weights: Tensor, steps: Sequence[int]) -> Tensor:
    """The last states of both directions, and a row of zeros after each: [2, K + 1, size].

    Args:
        gates: [2 M, 4 size], from the inputs. Paths are sorted by length, so those of a step are a prefix of the
            previous step's.
        weights: [2, size, 4 size], the recurrent weights.
    """
    size = weights.shape[1]
    h = c = gates.new_zeros(2, steps[0], size)
    parts = [gates.new_zeros(2, 1, size)]
    for step, (count, own) in enumerate(zip(steps, gates.split([2 * each for each in steps]), strict=True)):
        if step == 0:
            of_states = torch.zeros_like(own)
        else:
            parts.append(h[:, count:])
            h, c = h[:, :count], c[:, :count]
            of_states = torch.bmm(h, weights).view_as(own)
        h, c = (each.view(2, count, size) for each in _lstm_cell(own, of_states, c.reshape(-1, size)))
    parts.append(h)
    return torch.cat(parts[::-1], 1)


def _lstm_cell(gates: Tensor, of_states: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The states h and c after a step."""
    if gates.is_cuda:
        after, c, _ = torch.ops.aten._thnn_fused_lstm_cell.default(gates, of_states, c)
        return after, c
    i, f, g, o = (gates + of_states).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _softmax(rows: Tensor, queries: Tensor, slots: Slots) -> Tensor:
    """The weights of ``rows`` [groups, size, width] for ``queries`` [groups, width]: [groups, 1, size]. The weights of
    an empty group are finite, and its rows are 0."""
    added = slots.scores
    if rows.dtype == torch.float16:
        added = added.clamp(min=torch.finfo(rows.dtype).min)
    return torch.baddbmm(added.to(rows.dtype), queries.unsqueeze(1), rows.mT).softmax(-1)
