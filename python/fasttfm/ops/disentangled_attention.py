"""``disentangled_attention``: DeBERTa's and XLNet's attention, whose scores also compare queries with distances."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.kernels.common import philox
from fasttfm.kernels.common.launch import block_memory
from fasttfm.kernels.common.linear import accumulate, without_autocast
from fasttfm.kernels.common.rows import empty_numbers, empty_output
from fasttfm.kernels.disentangled_attention import reference
from fasttfm.kernels.disentangled_attention.problem import Problem
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import Output, checked, converted, indices, like_first, number
from fasttfm.ops.core.backends import Backend, always, dtype_name, refuse_native_cpu, torch_reference, triton_kernels
from fasttfm.ops.core.declare import Op
from fasttfm.ops.core.library import is_plain
from fasttfm.ops.linear import autocast

NAME = "disentangled_attention"
_BLOCK_ELEMENTS = 2**22  # of scores of a group of sequences on a CPU, unless one sequence has more
_ALIKE = 32  # sequences whose lengths differ by less are padded to one length on a CPU


def disentangled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distance_rows: Tensor,
    *,
    position_keys: Tensor | None = None,
    position_queries: Tensor | None = None,
    key_bias: Tensor | None = None,
    segments: Tensor | None = None,
    segment_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """softmax(scale (q_i k_j + q_i position_keys_d + k_j position_queries_d)) v, d the row of the distance i - j.

    Before they are scaled, scores may also have a bias of the key, and a bias of the query for keys of other segments.

    Args:
        q, k, v: ``[B, S, H, D]``, or packed ``[T, H, D]`` with ``cu_seqlens``: fp32, bf16 or fp16 (fp64 on the
            reference backend).
        distance_rows: int32 or int64 ``[2 L - 1]``: the row for each distance from 1 - L to L - 1, of at least
            ``max_seqlen`` or S tokens (``log_distance_rows``).
        position_keys, position_queries: ``[rows, H, D]``, in the type of q: keys and queries of distances. Without one
            its product is 0.
        key_bias: ``[T, H]`` or ``[B, S, H]``, in the type of q: added to all scores of a key.
        segments: Integers ``[T]`` or ``[B, S]``, next to ``segment_bias``.
        segment_bias: Of ``key_bias``'s shape and type: added to a query's scores of the keys of other segments.
        cu_seqlens: int32 ``[sequences + 1]``, the first row of each packed sequence, and the row count.
        max_seqlen: No packed sequence has more tokens; by default T, or L if it is less.
        mask: Booleans or integers ``[B, S]``, for dense tensors: tokens with 0 are neither queries nor keys. They may
            be anywhere; distances are those in S.
        scale: By default 1 / sqrt(D terms), where terms is one more than the number of tables.
        dropout_p: Probability that a weight is set to zero, rounded to a multiple of 1/256; 0 in evaluation.
        seed: int64 ``[1]``, decides what is dropped; by default drawn from torch's generator.
        backend: Requests one backend; by default the first that supports the call runs it.

    Returns:
        Of q's shape and type, contiguous; 0 where there is no token. Gradients have a fixed order of summation.
    """
    q, k, v, *others = autocast(q, k, v, position_keys, position_queries, key_bias, segment_bias)
    _check_tensors(q, k, v, cu_seqlens)
    tables, biases = others[:2], others[2:]
    _check_tables(q, *tables)
    segments = _check_biases(q, biases, segments)
    longest = _longest(q, distance_rows, cu_seqlens, max_seqlen)
    mask = _checked_mask(q, mask, cu_seqlens)
    if scale is None:
        terms = 1 + sum(table is not None for table in tables)
        scale = (int(q.shape[-1]) * terms) ** -0.5  # an int also in jit.trace
    checks.check_number(NAME, "scale", scale, low=-math.inf, high=math.inf)
    checks.check_number(NAME, "dropout_p", dropout_p, low=0.0, high=1.0)
    checks.check_seed(NAME, seed, like=q)
    if dropout_p == 0:
        seed = None  # from here on, a seed means dropout
    elif seed is None:
        seed = philox.draw_seed(q.device)
    options = (longest, float(scale), float(dropout_p))
    indices = (distance_rows.int(), segments, cu_seqlens, mask)
    out: Tensor = OP.apply(q, k, v, *tables, *biases, *indices, seed, *options, backend=backend)
    return out


def log_distance_rows(
    longest: int, span: int, farthest: int | None = None, *, device: torch.device | None = None
) -> Tensor:
    """DeBERTa's rows of distances, int32 ``[2 longest - 1]``, in tables of ``2 span`` rows.

    Row ``span`` is that of distance 0. With ``farthest``, distances up to ``span / 2`` have a row each, and larger ones
    share one for each logarithmic range up to ``farthest``; without it every distance has a row. Larger distances have
    the first or the last row.
    """
    distance = torch.arange(1 - longest, longest, device=device)
    if farthest is not None:
        near = span // 2
        logarithm = torch.log(distance.abs().clamp(min=near) / near)
        widest = torch.log(torch.tensor((farthest - 1) / near, dtype=torch.float32, device="cpu"))
        ranges = torch.ceil(logarithm / widest * (near - 1)) + near
        distance = torch.where(distance.abs() <= near, distance, (ranges * distance.sign()).long())
    return (distance + span).clamp(0, 2 * span - 1).int()


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_tensors(q: Any, k: Any, v: Any, cu_seqlens: Any) -> None:
    checks.check_floating(NAME, "q", q)
    if q.dim() != (4 if cu_seqlens is None else 3) or q.shape[-1] == 0:
        layout = "[B, S, H, D] without cu_seqlens" if cu_seqlens is None else "[T, H, D] next to cu_seqlens"
        raise checks.bad_value(NAME, "q", layout, f"shape {tuple(q.shape)}")
    for name, tensor in (("k", k), ("v", v)):
        checks.check_floating(NAME, name, tensor)
        _check_like(name, tensor, q, q.shape)
    if cu_seqlens is not None:
        checks.check_cu_seqlens(NAME, cu_seqlens, like=q)


def _check_like(name: str, tensor: Tensor, q: Tensor, shape: Any) -> None:
    checks.check_shape(NAME, name, tensor, shape)
    checks.check_device(NAME, name, tensor, like=q)
    if tensor.dtype != q.dtype:
        raise checks.bad_type(NAME, name, f"q's {dtype_name(q.dtype)}", dtype_name(tensor.dtype))


def _check_tables(q: Tensor, position_keys: Any, position_queries: Any) -> None:
    rows = None
    for name, table in (("position_keys", position_keys), ("position_queries", position_queries)):
        if table is None:
            continue
        checks.check_floating(NAME, name, table)
        rows = (table.shape[0] if table.dim() else 0) if rows is None else rows
        if rows == 0:
            raise checks.bad_value(NAME, name, "at least one row", f"shape {tuple(table.shape)}")
        _check_like(name, table, q, (rows, *q.shape[-2:]))


def _check_biases(q: Tensor, biases: Sequence[Any], segments: Any) -> Tensor | None:
    """The segments as int32."""
    key_bias, segment_bias = biases
    for name, bias in (("key_bias", key_bias), ("segment_bias", segment_bias)):
        if bias is not None:
            checks.check_floating(NAME, name, bias)
            _check_like(name, bias, q, q.shape[:-1])
    if segment_bias is None and segments is None:
        return None
    if segment_bias is None or segments is None:
        got = "only " + ("segments" if segment_bias is None else "segment_bias")
        raise checks.bad_value(NAME, "segments", "segments and segment_bias, or neither", got)
    checks.check_index(NAME, "segments", segments)
    checks.check_shape(NAME, "segments", segments, q.shape[:-2])
    checks.check_device(NAME, "segments", segments, like=q)
    segments_int32: Tensor = segments.int().contiguous()
    return segments_int32


def _longest(q: Tensor, distance_rows: Any, cu_seqlens: Tensor | None, max_seqlen: Any) -> int:
    """The length that no sequence exceeds."""
    checks.check_index(NAME, "distance_rows", distance_rows)
    checks.check_device(NAME, "distance_rows", distance_rows, like=q)
    if distance_rows.dim() != 1 or distance_rows.shape[0] % 2 == 0:
        raise checks.bad_value(
            NAME, "distance_rows", "an odd number of rows [2 L - 1]", f"shape {tuple(distance_rows.shape)}"
        )
    known = distance_rows.shape[0] // 2 + 1
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise checks.bad_value(NAME, "max_seqlen", "None without cu_seqlens", max_seqlen)
        longest: int = q.shape[1]
    elif max_seqlen is None:
        longest = min(q.shape[0], known)
    else:
        if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt)):
            raise checks.bad_type(NAME, "max_seqlen", "an int", type(max_seqlen).__name__)
        if max_seqlen < 0:
            raise checks.bad_value(NAME, "max_seqlen", "a number from 0 on", max_seqlen)
        longest = min(int(max_seqlen), q.shape[0]) if isinstance(max_seqlen, int) else max_seqlen  # type: ignore[assignment]
    if known < longest:
        got = f"{distance_rows.shape[0]} rows"
        raise checks.bad_value(NAME, "distance_rows", f"at least {2 * longest - 1} for {longest} tokens", got)
    return longest


def _checked_mask(q: Tensor, mask: Any, cu_seqlens: Tensor | None) -> Tensor | None:
    """The mask as booleans."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise checks.bad_type(NAME, "mask", "a tensor or None", type(mask).__name__)
    if cu_seqlens is not None:
        raise checks.bad_value(NAME, "mask", "None next to cu_seqlens", "a tensor")
    if mask.is_floating_point() or mask.is_complex():
        raise checks.bad_type(NAME, "mask", "a tensor of bool or integers", dtype_name(mask.dtype))
    checks.check_shape(NAME, "mask", mask, q.shape[:2])
    checks.check_device(NAME, "mask", mask, like=q)
    return mask if mask.dtype == torch.bool else mask != 0


def _check_values(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> None:
    """On the CPU: boundaries and rows are inside of their tensors. On a GPU kernels stay inside for all values."""
    position_keys, position_queries, _, _, distance_rows, _, cu_seqlens, _, _, max_seqlen, *_ = others
    if cu_seqlens is not None and is_plain((cu_seqlens,)):
        checks.check_cu_seqlens_values(NAME, cu_seqlens, q.shape[0], max_seqlen)
    table = position_queries if position_keys is None else position_keys
    if table is not None and distance_rows.is_cpu and is_plain((distance_rows,)):
        least, most = (int(bound) for bound in distance_rows.aminmax())
        if least < 0 or most >= table.shape[0]:
            raise checks.bad_value(NAME, "distance_rows", f"rows in [0, {table.shape[0]})", f"{least} to {most}")


# ---- the CPU: torch's GEMMs over sequences of similar lengths --------------------------------------------------------
# A product of queries with the rows of all distances, [S, 2 S - 1], holds the scores [S, S] in rows that each begin one
# element earlier: a view with other strides is the bias, without a copy.


class _Group(NamedTuple):
    """Some sequences as a padded batch, and their tokens' rows in the call's tensors."""

    tokens: Tensor  # int64 [n, L]: rows of [T, H, D]; 0 where there is no token
    present: Tensor | None  # bool [n, L]; None if all are there
    sequences: Tensor  # int64 [n]

    def heads(self, x: Tensor) -> Tensor:
        """Packed ``x`` [T, H, D] in the type of sums, [n, H, L, D]; 0 where there is no token."""
        rows = accumulate(x.index_select(0, self.tokens.flatten())).unflatten(0, self.tokens.shape)
        if self.present is not None:
            rows = rows.masked_fill_(~self.present[..., None, None], 0.0)
        return rows.transpose(1, 2).contiguous()

    def numbers(self, x: Tensor) -> Tensor:
        """Packed ``x`` [T, H] in the type of sums, [n, H, L]; 0 where there is no token."""
        return self.heads(x[..., None])[..., 0]

    def others(self, segments: Tensor) -> Tensor:
        """bool [n, 1, L, L]: whether query and key are of different segments, of packed ``segments`` [T]."""
        segment_of_token = segments[self.tokens]
        return (segment_of_token[:, :, None] != segment_of_token[:, None, :])[:, None]

    def write(self, x: Tensor, heads: Tensor) -> None:
        """Writes [n, H, L, ...] to the rows of ``x`` [T, H, ...]."""
        rows = heads.transpose(1, 2).to(x.dtype)
        if self.present is None:
            x.index_copy_(0, self.tokens.flatten(), rows.flatten(0, 1))
        else:
            x.index_copy_(0, self.tokens[self.present], rows[self.present])


def _groups(q: Tensor, problem: Problem) -> Iterator[_Group]:
    heads, cu_seqlens, mask = q.shape[-2], problem.cu_seqlens, problem.mask
    if cu_seqlens is None:
        count, longest = q.shape[:2]
        starts, lengths = [longest * index for index in range(count)], [longest] * count
    else:
        starts, lengths = cu_seqlens[:-1].tolist(), cu_seqlens.diff().tolist()
    alike: dict[int, list[int]] = {}
    for sequence, length in enumerate(lengths):
        if length:
            alike.setdefault(-(-length // _ALIKE), []).append(sequence)
    for members in alike.values():
        longest = max(lengths[sequence] for sequence in members)
        most = max(1, _BLOCK_ELEMENTS // (2 * heads * longest * longest))
        for first in range(0, len(members), most):
            some = members[first : first + most]
            token = torch.arange(longest, device=q.device)
            sizes, firsts = (
                torch.tensor([values[sequence] for sequence in some], dtype=torch.int64, device=q.device)[:, None]
                for values in (lengths, starts)
            )
            present, tokens = token < sizes, token + firsts
            if mask is not None:
                present = mask[some]
            whole = bool(present.all())
            tokens = tokens if whole else tokens.where(present, 0)
            numbers = torch.tensor(some, dtype=torch.int64, device=q.device)
            yield _Group(tokens, None if whole else present, numbers)


def _bias_view(products: Tensor, step: int) -> Tensor:
    """[n, H, S, S] of [n, H, S, 2 S - 1]: element i, j is [i, j - i + S - 1] for step 1, [j, i - j + S - 1] for -1."""
    n, heads, longest, width = products.shape
    rows = (width - 1, 1) if step == 1 else (1, width - 1)
    return products.as_strided(
        (n, heads, longest, longest), (heads * longest * width, longest * width, *rows), longest - 1
    )


def _by_distance(table: Tensor, distance_rows: Tensor, longest: int, step: int) -> tuple[Tensor, Tensor]:
    """The rows of a table for the columns of ``_bias_view``'s products, and their fp32 vectors [H, 2 S - 1, D]."""
    middle = len(distance_rows) // 2
    rows = distance_rows[middle - longest + 1 : middle + longest].long()
    rows = rows.flip(0) if step == 1 else rows
    return rows, accumulate(table).index_select(0, rows).transpose(0, 1)


def _tables(problem: Problem, longest: int) -> list[tuple[Tensor, Tensor] | None]:
    pairs = zip((problem.position_keys, problem.position_queries), (1, -1), strict=True)
    rows = problem.distance_rows
    return [None if table is None else _by_distance(table, rows, longest, step) for table, step in pairs]


def _group_weights(
    group: _Group, q: Tensor, k: Tensor, tables: list[tuple[Tensor, Tensor] | None], problem: Problem
) -> Tensor:
    """P [n, H, S, S], 0 where there is no query or key."""
    scores = q @ k.mT
    for heads, table, step in zip((q, k), tables, (1, -1), strict=True):
        if table is not None:
            scores += _bias_view(heads @ table[1].mT, step)
    if problem.key_bias is not None:
        scores += group.numbers(problem.key_bias.flatten(0, -2))[:, :, None]
    if problem.segment_bias is not None:
        assert problem.segments is not None
        bias = group.numbers(problem.segment_bias.flatten(0, -2))
        scores += bias[..., None] * group.others(problem.segments.flatten())
    scores *= problem.scale
    if group.present is None:
        return scores.softmax(-1)
    weights = scores.masked_fill_(~group.present[:, None, None, :], -torch.inf).softmax(-1)
    return weights.masked_fill_(~group.present[:, None, :, None], 0.0)


def _kept(group: _Group, weights: Tensor, problem: Problem) -> Tensor | None:
    """What dropout multiplies weights with; None without dropout."""
    if problem.seed is None:
        return None
    heads, queries = (torch.arange(size, device=weights.device) for size in weights.shape[1:3])
    threshold = philox.threshold(problem.p)
    positions = (group.sequences[:, None, None], heads[:, None], queries)
    return philox.kept_weights(problem.seed, *positions, weights.shape[3], threshold) * philox.scale(threshold)


def _forward_cpu(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    problem = Problem(*others)
    rows = [x.flatten(0, -3) for x in (q, k, v)]
    out = torch.zeros_like(rows[0], memory_format=torch.contiguous_format)
    with without_autocast(q):
        for group in _groups(q, problem):
            heads = [group.heads(x) for x in rows]
            tables = _tables(problem, heads[0].shape[2])
            weights = _group_weights(group, heads[0], heads[1], tables, problem)
            kept = _kept(group, weights, problem)
            group.write(out, (weights if kept is None else weights.mul_(kept)) @ heads[2])
    return out.view(q.shape), _make_lse(q).zero_()  # which the backward does not read


def _backward_cpu(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    options, wants = others[: len(Problem._fields)], others[len(Problem._fields) :]
    problem = Problem(*options)
    rows = [x.flatten(0, -3) for x in (q, k, v, dout)]
    gradients = [torch.zeros_like(rows[0], memory_format=torch.contiguous_format) for _ in range(3)]
    position_tables = (problem.position_keys, problem.position_queries)
    dtables = [None if table is None else accumulate(torch.zeros_like(table)) for table in position_tables]
    biases = (problem.key_bias, problem.segment_bias)
    dbiases = [None if bias is None else rows[0].new_zeros(rows[0].shape[:-1]) for bias in biases]
    with without_autocast(q):
        for group in _groups(q, problem):
            heads = [group.heads(x) for x in rows]
            tables = _tables(problem, heads[0].shape[2])
            weights = _group_weights(group, heads[0], heads[1], tables, problem)
            dscores = heads[3] @ heads[2].mT
            kept = _kept(group, weights, problem)
            dropped = weights
            if kept is not None:
                dscores, dropped = dscores.mul_(kept), weights * kept
            dv = dropped.mT @ heads[3]
            dscores = torch._softmax_backward_data(dscores, weights, -1, weights.dtype).mul_(problem.scale)
            group_gradients = [dscores @ heads[1], dscores.mT @ heads[0]]
            for index, (table, dtable, step) in enumerate(zip(tables, dtables, (1, -1), strict=True)):
                if table is None or dtable is None:
                    continue
                products = dscores.new_zeros(*dscores.shape[:3], 2 * dscores.shape[3] - 1)
                _bias_view(products, step).copy_(dscores)
                group_gradients[index] += products @ table[1]
                dtable.index_add_(0, table[0], (products.mT @ heads[index]).sum(0).transpose(0, 1))
            for gradient, term in zip(gradients, (*group_gradients, dv), strict=True):
                group.write(gradient, term)
            if dbiases[0] is not None:
                group.write(dbiases[0], dscores.sum(2))
            if dbiases[1] is not None:
                assert problem.segments is not None
                group.write(dbiases[1], (dscores * group.others(problem.segments.flatten())).sum(3))
    with_flags = zip((*position_tables, *biases), (*dtables, *dbiases), wants, strict=True)
    of_others = [
        x.to(tensor.dtype).view(tensor.shape) if tensor is not None and x is not None and want else empty_output(q)
        for tensor, x, want in with_flags
    ]
    return *(gradient.view(q.shape) for gradient in gradients), *of_others


def _forward_reference(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return reference.forward(q, k, v, Problem(*others))


def _backward_reference(*arguments: Any) -> tuple[Tensor, ...]:
    return reference.backward(*arguments[:6], Problem(*arguments[6:-4]), *arguments[-4:])


# ---- the declaration -------------------------------------------------------------------------------------------------


def _make_lse(q: Tensor, *_: Any) -> Tensor:
    return empty_numbers(q, q.shape[-2], math.prod(q.shape[:-2]))


def _refuse_heads(q: Tensor, *_: Any) -> str | None:
    """Why Triton's kernels do not take q: their tiles have to fit into the shared memory."""
    from fasttfm.kernels.disentangled_attention.triton import needed_memory

    if q.shape[-1] > 128:
        return f"takes heads of up to 128 columns, got {q.shape[-1]}"
    needed = needed_memory(q.element_size(), q.shape[-1])
    if q.is_cuda and needed > block_memory(q):
        got = f"{q.shape[-1]} columns of {dtype_name(q.dtype)}"
        return (
            f"takes heads whose tiles need {needed} bytes of shared memory on a GPU with {block_memory(q)}, got {got}"
        )
    return None


# The CPU's comes before Triton, so that Triton's interpreter runs on CPU tensors only if it is requested by name.
OP = Op(
    NAME,
    inputs=(
        checked("q"),
        checked("k"),
        checked("v"),
        checked("position_keys", optional=True, flagged=True),
        checked("position_queries", optional=True, flagged=True),
        checked("key_bias", optional=True, flagged=True),
        checked("segment_bias", optional=True, flagged=True),
        indices("distance_rows"),
        indices("segments", optional=True),
        indices("cu_seqlens", optional=True),
        indices("mask", optional=True),
        checked("seed", optional=True),
    ),
    options=(converted("max_seqlen", "SymInt"), number("scale", low=-math.inf), number("p")),
    outputs=(like_first("out"), Output("lse", _make_lse)),
    saves=("q", "k", "v", "out", "lse", *Problem._fields[:9]),
    gradients=("q", "k", "v", "position_keys", "position_queries", "key_bias", "segment_bias"),
    backward_options=Problem._fields[9:],
    chosen_by=("q",),
    check_values=_check_values,
    instead="torch.softmax and torch.gather",
    backends=(
        Backend("cpu", always, refuse_native_cpu, _forward_cpu, _backward_cpu),
        triton_kernels(NAME, refuse=_refuse_heads),
        torch_reference(_forward_reference, _backward_reference),
    ),
)
