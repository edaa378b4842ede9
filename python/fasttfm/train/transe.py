"""TransE (Bordes et al., 2013): vectors of a graph's entities and relations such that head + relation is near tail.

    d(h, r, t) = |h + r - t|        L1 or L2
    loss = sum of max(0, margin + d(h, r, t) - d(h', r, t'))        over facts and corrupted ones

In a corrupted fact a random entity replaces either the head or the tail. The vectors of entities have length 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fasttfm.data.knowledge import Graph
from fasttfm.train.settings import at_least, random_seed


@dataclass(frozen=True)
class TransESettings:
    width: int = 100
    epochs: int = 200
    batch_size: int = 512  # facts
    learning_rate: float = 0.01  # Adam's
    margin: float = 1.0
    negatives: int = 4  # corrupted facts for each
    norm: int = 1  # of the distance: 1 or 2
    held_out: float = 0.05  # the fraction of facts in the test set
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("width", "epochs", "batch_size", "negatives"):
            at_least(name, getattr(self, name), 1)
        for name in ("learning_rate", "margin"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected a number above 0, got {getattr(self, name)}")
        if self.norm not in (1, 2):
            raise ValueError(f"norm: expected 1 or 2, got {self.norm}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out: expected a fraction of the facts in [0, 1), got {self.held_out}")
        random_seed(self.seed)


@dataclass(frozen=True)
class Embedded:
    """A graph's vectors, and the ranks of the test facts among all facts with another head or tail."""

    entities: Tensor  # [entities, width]
    relations: Tensor  # [relations, width]
    loss: float  # of the last epoch
    ranks: Tensor  # int64 [2 * tested facts], 1 is best; other true facts are not counted (filtered)

    @property
    def mean_rank(self) -> float:
        return float(self.ranks.double().mean())

    def hits(self, most: int = 10) -> float:
        """The fraction of ranks up to ``most``."""
        return float((self.ranks <= most).double().mean())


def train_transe(
    graph: Graph,
    settings: TransESettings,
    *,
    test: Tensor | None = None,
    watch: Callable[[range], Iterable[int]] = iter,
) -> Embedded:
    """Trains the vectors of a graph.

    Args:
        graph: The facts.
        settings: The settings of the training.
        test: Facts [n, 3] to rank; by default the fraction ``held_out`` of the graph's, which is not trained on, or all
            of them if it is 0.
        watch: Wraps the range of epochs, for example ``progress.tracked``.
    """
    facts = graph.triples
    if test is None and settings.held_out:
        facts, test = graph.split(settings.held_out, settings.seed)
    generator = torch.Generator("cpu").manual_seed(settings.seed)
    bound = 6 / math.sqrt(settings.width)
    entities, relations = (
        torch.empty(len(names), settings.width, dtype=torch.float32, device="cpu").uniform_(
            -bound, bound, generator=generator
        )
        for names in (graph.entities, graph.relations)
    )
    relations = functional.normalize(relations)
    parameters = [entities.requires_grad_(), relations.requires_grad_()]
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate)
    loss = 0.0
    for _ in watch(range(settings.epochs)):
        order = torch.randperm(len(facts), generator=generator, device="cpu")
        total = 0.0
        for rows in order.split(settings.batch_size):
            _to_length_one(entities)
            batch = facts[rows]
            margin_loss = _margin_loss(entities, relations, batch, settings, generator)
            optimizer.zero_grad()
            margin_loss.backward()
            optimizer.step()
            total += float(margin_loss.detach()) * len(rows)
        loss = total / len(facts)
    _to_length_one(entities)
    everything = facts if test is None else torch.cat([facts, test])
    tested = everything if test is None or not len(test) else test
    entities, relations = entities.detach(), relations.detach()
    return Embedded(entities, relations, loss, ranks(entities, relations, tested, everything, norm=settings.norm))


@torch.no_grad()
def _to_length_one(entities: Tensor) -> None:
    entities.copy_(functional.normalize(entities))


def _margin_loss(
    entities: Tensor, relations: Tensor, batch: Tensor, settings: TransESettings, generator: torch.Generator
) -> Tensor:
    head, relation, tail = batch.unbind(1)
    size = (len(batch), settings.negatives)
    others = torch.randint(len(entities), size, generator=generator, device="cpu")
    of_head = torch.rand(size, generator=generator, dtype=torch.float32, device="cpu") < 0.5
    step = relations[relation]
    right = (entities[head] + step - entities[tail]).norm(p=settings.norm, dim=-1)
    heads = entities[torch.where(of_head, others, head[:, None])]
    tails = entities[torch.where(of_head, tail[:, None], others)]
    wrong = (heads + step[:, None] - tails).norm(p=settings.norm, dim=-1)
    return functional.relu(settings.margin + right[:, None] - wrong).mean()


@torch.no_grad()
def ranks(entities: Tensor, relations: Tensor, tested: Tensor, facts: Tensor, *, norm: int = 1) -> Tensor:
    """The rank of each test fact's tail among all entities, then of its head, without other true ``facts`` (filtered).
    Ties count half, so that equal vectors do not get good ranks."""
    known: dict[tuple[str, int, int], list[int]] = {}
    for head, relation, tail in facts.tolist():
        known.setdefault(("tail", head, relation), []).append(tail)
        known.setdefault(("head", tail, relation), []).append(head)
    ranks = []
    for side, known_column, target_column, sign in (("tail", 0, 2, 1.0), ("head", 2, 0, -1.0)):
        for row in tested.tolist():
            target = entities[row[known_column]] + sign * relations[row[1]]
            distances = (entities - target).norm(p=norm, dim=-1)
            distance = float(distances[row[target_column]])
            others = [entity for entity in known[side, row[known_column], row[1]] if entity != row[target_column]]
            distances[others] = math.inf
            equal = int((distances == distance).sum()) - 1
            ranks.append(1 + int((distances < distance).sum()) + equal // 2)
    return torch.tensor(ranks, dtype=torch.int64, device="cpu")
