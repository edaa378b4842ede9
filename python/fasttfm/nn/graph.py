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
from torch.autograd.function import once_differentiable
from torch.nn import functional

_SUM = 0  # embedding_bag's code of the mode "sum"
_NO_MEMBER = -1e30  # finite, so that groups without members have finite weights


def _sums(rows: Tensor, order: Tensor, starts: Tensor, scales: Tensor | None = None) -> Tensor:
    """The sums of the rows ``order[starts[i]:starts[i + 1]]``, each multiplied by its scale, without atomics."""
    if not len(order):
        return rows.new_zeros(len(starts) - 1, rows.shape[1])
    return torch.embedding_bag(rows, order, starts, False, _SUM, False, scales, True)[0]


class Triples(NamedTuple):
    """The triples that each direction of the LSTM reads: all paths' first ones, then their second ones, ..."""

    rows: Tensor  # int64 [2 * M * 3]: for each direction and triple, head node, N + relation, tail node
    order: Tensor  # int64 [4 M]: the indices in ``rows`` of all nodes, sorted by node
    starts: Tensor  # int64 [N + 1]: where each node starts in ``order``

    @staticmethod
    def of(triples: Any, steps: Sequence[int], nodes: int) -> Triples:
        """Made of the triples [M, 3] that the first direction reads; the second reads each path in reverse order."""
        counts = np.array(steps, dtype=np.int64)
        paths = np.arange(max(steps, default=0))
        backwards = (counts[:, None] > paths).sum(0) - 1 - np.arange(len(steps))[:, None]  # [steps, paths]
        first = np.cumsum(counts) - counts
        second = (first[backwards] + paths)[backwards >= 0]
        rows = (triples + np.array([0, nodes, 0]))[np.concatenate([np.arange(len(triples)), second])].flatten()
        of_nodes = np.flatnonzero(rows < nodes)
        order = of_nodes[np.argsort(rows[of_nodes], kind="stable")]
        starts = np.searchsorted(rows[order], np.arange(nodes + 1))
        return Triples(*map(torch.from_numpy, (rows, order, starts)))


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
        by_slot = torch.from_numpy(members).view(count, size)
        scores = torch.zeros(count, 1, size, dtype=torch.float32, device="cpu").masked_fill(
            (by_slot == len(groups)).unsqueeze(1), _NO_MEMBER
        )
        return Slots(by_slot, scores, torch.from_numpy(slot_of_member))


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
    triples: Triples  # of the paths
    path_slots: Slots  # the paths of each pair
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
        return GraphBatch(
            concepts=torch.from_numpy(numbers(concepts, dtype=np.int64)),
            edges=torch.from_numpy(edges.T.copy()),
            scales=torch.from_numpy((1 / degrees[edges].T).astype(np.float32)),
            starts=torch.from_numpy(np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)),
            pairs=torch.from_numpy(pairs.T.copy()),
            ends=torch.from_numpy(pairs[:, 1:].flatten()),
            owners=torch.from_numpy(numbers(owners, dtype=np.int64)),
            triples=Triples.of(triples, steps, nodes),
            path_slots=Slots.of(owners, len(pairs)),
            pair_slots=Slots.of(pairs[:, 0], graphs),
            steps=tuple(steps),
            graphs=graphs,
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> GraphBatch:
        changed: dict[str, Any] = {}
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if isinstance(value, Tensor):
                changed[name] = change(value)
            elif isinstance(value, (Triples, Slots)):
                changed[name] = type(value)(*map(change, value))
        return replace(self, **changed)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> GraphBatch:
        return self.each(lambda tensor: tensor.to(device, non_blocking=non_blocking))


class Reasoned(NamedTuple):
    """The vectors of schema graphs, and the attention weights of their paths and pairs."""

    vectors: Tensor  # [graphs, output_size]
    path_weights: Tensor  # [K]; the sum over the paths of a pair is 1
    pair_weights: Tensor  # [P]; the sum over the pairs of a graph is 1


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

    def forward(self, batch: GraphBatch, statements: Tensor) -> Reasoned:
        """``statements`` [graphs, statement_size]. Autocast applies only to the path encoder; the other parts are
        small, and use the parameters' precision."""
        device, dtype = statements.device.type, self.concepts.weight.dtype
        autocast = torch.is_autocast_enabled(device) and dtype != torch.float64
        path_dtype = torch.get_autocast_dtype(device) if autocast else dtype
        with torch.autocast(device, enabled=False):
            h = self.convolved(batch)
            paths = self.path_vectors(batch, h, path_dtype)
            return self._attended(batch, statements.to(h.dtype), h, paths)

    def _attended(self, batch: GraphBatch, statements: Tensor, h: Tensor, paths: Tensor) -> Reasoned:
        """Both levels of attention."""
        ends = h.index_select(0, batch.ends).view(-1, 2 * h.shape[1])
        pairs = self.pair_encoder(torch.cat([statements.index_select(0, batch.pairs[0]), ends], -1))  # T
        path_weights = _softmax(paths, self.path_query(pairs), batch.path_slots)  # [P, 1, size]
        relations = torch.bmm(path_weights, paths).squeeze(1)  # R: [P, path_size]
        both = functional.pad(torch.cat([relations, pairs], -1), (0, 0, 0, 1))  # a row of zeros for missing pairs
        members = batch.pair_slots.members
        both = both.index_select(0, members.flatten()).view(*members.shape, self.output_size)
        query = self.pair_query(statements)
        pair_weights = _softmax(both[..., -query.shape[1] :], query, batch.pair_slots)  # [graphs, 1, size]
        weighted = (pair_weights, batch.pair_slots), (path_weights, batch.path_slots)
        of_pairs, of_paths = (weights.flatten().index_select(0, slots.slot_of_member) for weights, slots in weighted)
        return Reasoned(torch.bmm(pair_weights, both).squeeze(1), of_paths, of_pairs)

    def convolved(self, batch: GraphBatch) -> Tensor:
        """The nodes' vectors after the convolutions: [N, C]."""
        h: Tensor = self.concepts(batch.concepts)
        for layer in self.convolutions:
            h = layer(h, batch)
        return h

    def path_vectors(self, batch: GraphBatch, h: Tensor, dtype: torch.dtype) -> Tensor:
        """The last states of both directions of the LSTM over each path's triples, in the slots of their pairs, padded
        with 0: [P, size, path_size]. The LSTM runs in ``dtype``."""
        if not batch.steps:
            return h.new_zeros(*batch.path_slots.members.shape, self.path_query.out_features)
        vectors = _PathVectors.apply(h, self.relations.weight, batch, dtype, *self.path_encoder.parameters())
        if vectors.grad_fn is not None:
            # Autograd runs the node with the largest number first. With 0, the backward of paths and nodes is launched
            # after that of the statements' encoder, while the GPU is busy with it.
            vectors.grad_fn._set_sequence_nr(0)
        return cast("Tensor", vectors)


class _PathVectors(torch.autograd.Function):
    """``GraphReasoner.path_vectors`` with the LSTM's ``parameters``; GEMMs have the type ``dtype``.

    A path's states in both directions are adjacent. Paths are sorted by length, so those of a step are a prefix of the
    previous step's.
    """

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, relations: Tensor, batch: GraphBatch, dtype: torch.dtype, *parameters: Tensor
    ) -> Tensor:
        weights, recurrent, biases = _both_directions(parameters, dtype)
        # On Arm CPUs, bmm takes 1.4 times as long if a factor is transposed and the result is strided.
        transposed = [weight.mT.contiguous() for weight in (weights, recurrent)]
        steps, slots, size = batch.steps, batch.path_slots.members, recurrent.shape[2]
        x = torch.cat([h, relations]).to(dtype).index_select(0, batch.triples.rows).view(2, sum(steps), -1)
        gates = x.new_empty(x.shape[1], 2, 4 * size)
        torch.bmm(x, transposed[0], out=gates.transpose(0, 1))
        c = x.new_zeros(2 * steps[0], size)
        kept, last = [c], [c[:2].view(1, -1)]  # a row of zeros for missing paths
        states: list[Tensor] = []
        for step, (count, of_step) in enumerate(zip(steps, gates.split(steps), strict=True)):
            if step == 0:
                others = biases.expand(count, 2, -1).contiguous()
            else:
                last.append(states[-1][count:].view(-1, 2 * size))
                states[-1] = states[-1][:count]
                others = torch.empty_like(of_step)
                of_states = states[-1].transpose(0, 1), transposed[1]
                torch.baddbmm(biases.unsqueeze(1), *of_states, out=others.transpose(0, 1))
            after, c, activated = _lstm_cell(of_step.view(2 * count, -1), others.view(2 * count, -1), c[: 2 * count])
            states.append(after.view(count, 2, size))
            kept += [activated, c]
        last.append(states.pop().view(-1, 2 * size))
        ctx.save_for_backward(x, weights, recurrent, *kept, *states)
        ctx.batch, ctx.sizes, ctx.dtypes = batch, (len(h), len(relations)), (h.dtype, parameters[0].dtype)
        return torch.cat(last[::-1]).index_select(0, slots.flatten()).to(h.dtype).view(*slots.shape, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dpaths: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, recurrent, *kept = ctx.saved_tensors
        steps, size = ctx.batch.steps, recurrent.shape[2]
        kept, states = kept[: 2 * len(steps) + 1], kept[2 * len(steps) + 1 :]
        # A path's last state gets the gradient of the path's vector, and the states before it that of the next step.
        dstates = dpaths.reshape(-1, 2 * size).index_select(0, ctx.batch.path_slots.slot_of_member).to(x.dtype)
        dc, parts = None, []
        for step in reversed(range(len(steps))):
            count, (c, activated, after) = steps[step], kept[2 * step : 2 * step + 3]
            dh = dstates[:count].view(-1, size)
            dgates, dc = _lstm_cell_backward(dh, dc, c[: 2 * count], after, activated)
            parts.append(dgates.view(count, 2, -1))
            if step:
                torch.bmm(parts[-1].transpose(0, 1), recurrent, out=dh.view(count, 2, size).transpose(0, 1))
                dc = functional.pad(dc, (0, 0, 0, 2 * (steps[step - 1] - count)))
        dgates = torch.cat(parts[::-1])
        directions = dgates.transpose(0, 1)
        dtable = _PathVectors.table_gradients(ctx, torch.bmm(directions, weights))
        dtype = ctx.dtypes[1]
        dweights = torch.bmm(directions.mT, x).to(dtype).unbind()
        dbiases = dgates.sum(0, dtype=dtype).unbind()
        drecurrent: Sequence[Tensor | None] = (None, None)
        if states:
            before = torch.cat(states).transpose(0, 1)
            drecurrent = torch.bmm(directions[:, steps[0] :].mT, before).to(dtype).unbind()
        of_directions = zip(dweights, drecurrent, dbiases, dbiases, strict=True)
        return *dtable, None, None, *(gradient for direction in of_directions for gradient in direction)

    @staticmethod
    def table_gradients(ctx: Any, dx: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of nodes and relations. There are few relations in many triples, so that the sums of their
        gradients are a GEMM."""
        (nodes, relations), (of_nodes, of_relations) = ctx.sizes, ctx.needs_input_grad[:2]
        dnodes = drelations = None
        triples, dx = ctx.batch.triples, dx.view(len(ctx.batch.triples.rows), -1)
        if of_nodes:
            dnodes = _sums(dx, triples.order, triples.starts).to(ctx.dtypes[0])
        if of_relations:
            numbers = torch.arange(nodes, nodes + relations, device=dx.device)
            chosen = (numbers[:, None] == triples.rows[1::3]).to(dx.dtype)
            drelations = (chosen @ dx[1::3]).to(ctx.dtypes[0])
        return dnodes, drelations


def _both_directions(parameters: tuple[Tensor, ...], dtype: torch.dtype) -> list[Tensor]:
    """The LSTM's weights [2, 4 size, inputs], recurrent weights [2, 4 size, size] and biases [2, 4 size]."""
    pairs = parameters[::4], parameters[1::4], torch._foreach_add(parameters[2::4], parameters[3::4])
    stacked = [pair[0].new_empty(2, *pair[0].shape, dtype=dtype) for pair in pairs]
    torch._foreach_copy_([w for both in stacked for w in both.unbind()], [w for pair in pairs for w in pair])
    return stacked


def _lstm_cell(gates: Tensor, others: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The states h and c after a step with the gates ``gates + others``, and the activated gates."""
    if gates.is_cuda:
        return cast("tuple[Tensor, Tensor, Tensor]", torch.ops.aten._thnn_fused_lstm_cell.default(gates, others, c))
    activated = gates + others
    i, f, g, o = activated.chunk(4, 1)
    for gate in (i, f, o):
        gate.sigmoid_()
    c = f * c + i * g.tanh_()
    return o * c.tanh(), c, activated


def _lstm_cell_backward(
    dh: Tensor, dc: Tensor | None, c: Tensor, after: Tensor, activated: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the gates and of c before the step. ``dh`` and ``dc`` are those of the states after it, where c
    is ``after``."""
    if dh.is_cuda:
        backward = torch.ops.aten._thnn_fused_lstm_cell_backward_impl.default
        dgates, dc, _ = backward(dh, dc, c, after, activated, False)
        return dgates, dc
    of_sigmoid, of_tanh = torch.ops.aten.sigmoid_backward.default, torch.ops.aten.tanh_backward.default
    i, f, g, o = activated.chunk(4, 1)
    squashed = after.tanh()
    through = of_tanh(dh * o, squashed)
    dc = through if dc is None else through + dc
    by_gate = of_sigmoid(dc * g, i), of_sigmoid(dc * c, f), of_tanh(dc * i, g), of_sigmoid(dh * squashed, o)
    return torch.cat(by_gate, 1), dc * f


def _softmax(rows: Tensor, queries: Tensor, slots: Slots) -> Tensor:
    """The weights of ``rows`` [groups, size, width] for ``queries`` [groups, width]: [groups, 1, size]. The weights of
    an empty group are finite, and its rows are 0."""
    added = slots.scores
    if rows.dtype == torch.float16:
        added = added.clamp(min=torch.finfo(rows.dtype).min)
    return torch.baddbmm(added.to(rows.dtype), queries.unsqueeze(1), rows.mT).softmax(-1)
