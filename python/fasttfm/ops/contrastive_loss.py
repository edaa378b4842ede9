"""``contrastive_loss``: cross entropy of the similarities of a batch's queries and keys, which are never all in memory.

It is ``linear_cross_entropy`` with the other side's vectors as the weight, and runs on its engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.vocabulary.cross_entropy import Loss
from fasttfm.ops import linear, vocabulary
from fasttfm.ops.core import checks
from fasttfm.ops.core.backends import requested
from fasttfm.ops.core.library import is_plain
from fasttfm.ops.linear_cross_entropy import OP as LINEAR_CROSS_ENTROPY
from fasttfm.ops.linear_cross_entropy import Call, CountedLoss, vocabulary_loss

NAME = "contrastive_loss"


def contrastive_loss(
    queries: Tensor,
    keys: Tensor,
    negatives: Tensor | None = None,
    *,
    labels: Tensor | None = None,
    temperature: float = 0.05,
    symmetric: bool = False,
    group: Any = None,
    reduction: str = "mean",
    counts: bool = False,
    backend: str | None = None,
) -> Tensor | CountedLoss:
    """Cross entropy of ``queries keys^T / temperature``, where key i is what query i should find (InfoNCE, in-batch
    negatives).

    Args:
        queries: ``[B, D]``, fp32, bf16 or fp16 (fp64 on the reference backend). For cosine similarity normalize both
            sides first: ``torch.nn.functional.normalize(x, dim=-1)``.
        keys: ``[K, D]`` in the queries' type, with at least as many rows: row i is the positive of query i, and a
            negative of all others.
        negatives: ``[N, D]`` or ``[B, n, D]``, or None: further candidates of every query (hard negatives).
        labels: int64 or int32 ``[B]``: the row of ``keys`` that is each query's positive, or -100 for a query that does
            not count; by default 0, 1, 2, ...
        temperature: Above 0; small values weigh the hardest negatives more.
        symmetric: Whether to average with the loss of finding the query of each key. It needs as many keys as queries
            and no labels.
        group: A process group of torch.distributed, or None: the keys, negatives (and queries, if symmetric) of all its
            ranks are candidates. Every rank needs as many rows as the others. The loss is of this rank's queries; the
            gradients of the keys are summed over the ranks, so that with DistributedDataParallel, which averages them,
            training is that of the mean over all ranks' queries.
        reduction: "mean" over the queries that count, "sum", or "none" for a loss ``[B]``.
        counts: Whether to return a ``CountedLoss`` with the number of queries that count, and of those whose positive
            has the highest score.
        backend: Requests one backend; by default the first that supports the call runs it.

    Returns:
        The loss in fp32 (fp64 for fp64). Under autocast everything is cast to its type first, as around
        ``torch.nn.Linear``.

    Raises:
        ValueError: For a label that is not a row of ``keys``. On the CPU this call raises. On a GPU the loss is NaN,
            and a later call or ``fasttfm.ops.check_errors()`` raises.
    """
    queries, keys, negatives = linear.autocast(queries, keys, negatives)
    _check(queries, keys, negatives, labels, temperature)
    _check_options(queries, keys, labels, symmetric, counts, reduction)
    OP.table.check_name(backend)
    # Without labels every query counts: the divisor of the mean is known, and nothing counts labels on the device.
    total = len(queries) if labels is None and reduction == "mean" else None
    offset = 0
    everyone = keys
    if group is not None:
        offset = torch.distributed.get_rank(group) * len(keys)
        everyone = _Gathered.apply(keys, group)
        negatives = None if negatives is None else _Gathered.apply(negatives.flatten(0, -2), group)
    candidates = everyone if negatives is None else torch.cat([everyone, negatives.flatten(0, -2)])
    if labels is None:
        labels = torch.arange(offset, offset + len(queries), device=queries.device)
    else:  # a row that is not one of this rank's keys names no candidate, so that the kernels refuse it on a GPU, too
        named = torch.where((labels >= 0) & (labels < len(keys)), labels + offset, len(candidates))
        labels = torch.where(labels == -100, labels, named)
    call = Call(NAME, _loss(temperature, counts), reduction, requested(backend))
    result = vocabulary_loss(queries, candidates, None, labels, call, total=total)
    loss = result.loss
    if symmetric:
        others = queries if group is None else _Gathered.apply(queries, group)
        back = Call(NAME, _loss(temperature, False), reduction, requested(backend))
        loss = (loss + vocabulary_loss(keys, others, None, labels, back, total=total).loss) / 2
    return CountedLoss(loss, result.predictions, result.correct) if counts else loss


def _loss(temperature: float, counts: bool) -> Loss:
    """A block of 256 MiB keeps a call's memory near that of the gradients; larger blocks are not faster. Numbers are
    written out: torch.compile with dynamic shapes makes symbols of those that have a name, and fails where two calls
    share one."""
    return Loss(-100, 0.0, 0.0, 1.0, counts, 1 / float(temperature), 256 * 2**20)


class _Gathered(torch.autograd.Function):
    """The rows of all ranks, in their order; a rank's gradient is the sum of those that all ranks have for its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.rows = group, len(x)
        gathered = x.new_empty(torch.distributed.get_world_size(group) * len(x), *x.shape[1:])
        torch.distributed.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        local = gradient.new_empty(ctx.rows, *gradient.shape[1:])
        torch.distributed.reduce_scatter_tensor(local, gradient.contiguous(), group=ctx.group)
        return local, None


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check(queries: Any, keys: Any, negatives: Any, labels: Any, temperature: Any) -> None:
    checks.check_floating(NAME, "queries", queries)
    if queries.dim() != 2 or queries.shape[1] == 0:
        raise checks.bad_value(NAME, "queries", "shape (B, D) with a column", f"shape {tuple(queries.shape)}")
    linear.check_weight(NAME, "keys", keys, queries.shape[1], queries, like="queries")
    if negatives is not None:
        rows = negatives.flatten(0, -2) if isinstance(negatives, Tensor) and negatives.dim() > 2 else negatives
        linear.check_weight(NAME, "negatives", rows, queries.shape[1], queries, like="queries")
    if labels is not None:
        vocabulary.check_indices(NAME, "labels", labels, (len(queries),), like=queries)
        if is_plain((labels,)):
            vocabulary.check_values(NAME, "labels", labels, len(keys), ignored=-100)
    elif len(keys) < len(queries):
        raise checks.bad_value(NAME, "keys", f"at least the queries' {len(queries)} rows", f"{len(keys)} rows")
    checks.check_number(NAME, "temperature", temperature, low=0.0, high=float("inf"), low_open=True)


def _check_options(queries: Tensor, keys: Tensor, labels: Any, symmetric: Any, counts: Any, reduction: Any) -> None:
    for name, value in (("symmetric", symmetric), ("counts", counts)):
        if not isinstance(value, bool):
            raise checks.bad_type(NAME, name, "True or False", type(value).__name__)
    if symmetric and labels is not None:
        raise checks.bad_value(NAME, "symmetric", "False with labels", "True")
    if symmetric and len(keys) != len(queries):
        expected = f"the queries' {len(queries)} rows with symmetric"
        raise checks.bad_value(NAME, "keys", expected, f"{len(keys)} rows")
    vocabulary.check_reduction(NAME, reduction, None, like=queries)


OP = LINEAR_CROSS_ENTROPY.sharing(NAME)
