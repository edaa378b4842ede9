"""What the losses over a vocabulary share: logits of which only a block of rows is in memory at a time, gathered rows,
and the checks of common arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.common.rows import as_rows
from fasttfm.ops import linear
from fasttfm.ops.column_sum import column_sum_op
from fasttfm.ops.core import checks
from fasttfm.ops.core.backends import dtype_name

REDUCTIONS = ("none", "mean", "sum")

# A block of rows is so large that adding to dweight (8 V C bytes) is cheap compared to its GEMMs, and so small that its
# logits take little memory: at most 8 blocks, of at least 960 rows each, unless that takes more than 512 MiB.
_BLOCKS = 8
_ROWS = 960
_BYTES = 512 * 2**20
_ROW_STEP = 128  # rows of a product's tile
_COLUMN_STEP = 64
_GEMM_MULTIPLE = 8  # cuBLAS GEMMs are slow for sizes that are not a multiple of 16 bytes


def padded(vocabulary: int) -> int:
    """Columns of a buffer for logits on a GPU: rows start at multiples of 128 bytes, whatever the vocabulary. On a CPU
    torch multiplies into rows that follow each other directly up to three times faster."""
    return -(-vocabulary // _COLUMN_STEP) * _COLUMN_STEP


def rows_of_block(count: int, row_bytes: int, limit: int = 0) -> int:
    """How many rows of logits are in memory at a time, of ``count`` in all; 128 even above the limit in bytes."""
    blocks = min(_BLOCKS, max(1, count // _ROWS))
    steps = -(-count // (blocks * _ROW_STEP))
    most = max(1, (limit or _BYTES) // (row_bytes * _ROW_STEP))
    return min(count, _ROW_STEP * max(1, min(steps, most)))


def product_type(x: Tensor) -> torch.dtype:
    """The type of logits and their gradients in memory: x's own on a GPU; fp32 on a CPU, whose products of 16-bit types
    are slow where it has no instructions for them, and rounded between blocks where it has."""
    return x.dtype if x.is_cuda else torch.float32


def stream(
    rows: Tensor,
    weight: Tensor,
    visit: Callable[[int, Tensor], None],
    needed: Sequence[bool],
    *,
    columns: int,
    into_rows: bool,
    split: bool = False,
    scale: float = 1.0,
    block_bytes: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Iterates over blocks of rows [N, C]: their logits, ``visit(first, logits)``, and the GEMMs of the gradients it
    writes.

    Logits are ``scale`` times the product; gradients of rows and weight do not include that factor. ``block_bytes`` is
    the limit of ``rows_of_block``.

    ``visit`` gets the index of the block's first row and the logits, [n, columns], of which the first V columns are
    filled. If any gradient is needed it overwrites all columns: by their gradients, and by zeros after them. With
    ``split`` the GEMMs end at a multiple of 8 tokens, and Triton kernels compute the tail.

    Returns dh [N, C] in the rows' type, dweight [V, C] and dbias [V] in fp32, empty if they are not needed. With
    ``into_rows`` dh may overwrite the rows.
    """
    count, vocabulary = len(rows), len(weight)
    dtype, device = product_type(rows), rows.device
    want_dh, want_dweight, want_dbias = needed
    factor = weight.to(dtype)
    last = _VocabTail(factor, count) if split and vocabulary % _GEMM_MULTIPLE else None
    even = vocabulary if last is None else last.first
    dh = linear.empty_output(rows)
    if want_dh:
        own_place = into_rows and (last is None or not want_dweight)
        dh = rows if own_place else torch.empty(rows.shape, dtype=rows.dtype, device=device)
    make = torch.empty if count > 0 else torch.zeros
    dweight = make(weight.shape if want_dweight else 0, dtype=torch.float32, device=device)
    dbias = torch.zeros(vocabulary if want_dbias else 0, dtype=torch.float32, device=device)
    step = max(1, rows_of_block(count, columns * dtype.itemsize, block_bytes))
    buffer = torch.empty(step, columns, dtype=dtype, device=device)
    for first in range(0, count, step):
        h = rows[first : first + step]
        part = h.to(dtype)
        block = buffer[: len(h)]
        logits = block[:, :even]
        if scale == 1.0:
            torch.mm(part, factor[:even].t(), out=logits)
        else:
            torch.addmm(logits, part, factor[:even].t(), beta=0, alpha=scale, out=logits)
        if last is not None:
            last.logits(part, block, scale)
        visit(first, block)
        if want_dbias:
            dbias += column_sum_op(block, torch.float32, None)[:vocabulary]
        if want_dweight:
            _add_product(dweight[:even], logits.t(), part, first == 0)
        target = dh[first : first + step]
        if last is not None and (want_dh or want_dweight):
            last.start(first, block, target if want_dh else None)
        if want_dh and dtype == dh.dtype:
            _product(target, logits, factor[:even], last is not None)
        elif want_dh:
            target.copy_(torch.mm(logits, factor, out=torch.empty_like(part)))
    if last is not None and want_dweight and count > 0:
        last.finish(dweight, rows)
    return dh, dweight, dbias


def logits_split(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """Fills the first V columns of out with rows weight^T, as ``stream`` with ``split`` does."""
    even = len(weight) // _GEMM_MULTIPLE * _GEMM_MULTIPLE
    torch.mm(rows, weight[:even].t(), out=out[:, :even])
    if even < len(weight):
        _VocabTail(weight, 0).logits(rows, out)


class _VocabTail:
    """The tail of the vocabulary after the last multiple of 8, whose logits and gradients are in the same blocks."""

    def __init__(self, weight: Tensor, count: int) -> None:
        from fasttfm.kernels.vocabulary import triton_tail

        self.kernels = triton_tail
        self.first = len(weight) // _GEMM_MULTIPLE * _GEMM_MULTIPLE
        self.end = len(weight)
        self.weight = weight[self.first :].contiguous()
        # Their gradients of all rows. Products with a whole group of 8 columns are faster than with a few.
        self.g = torch.empty(count, triton_tail.GROUP, dtype=weight.dtype, device=weight.device)

    def logits(self, rows: Tensor, block: Tensor, scale: float = 1.0) -> None:
        self.kernels.logits(rows, self.weight, block[:, self.first : self.end], scale)

    def start(self, first: int, block: Tensor, dh: Tensor | None) -> None:
        """Initializes dh of a block with the contribution of the tail."""
        g = block[:, self.first : self.end]
        self.kernels.start(g, self.weight, dh, self.g[first : first + len(block)])

    def finish(self, dweight: Tensor, rows: Tensor) -> None:
        gradient = torch.empty(self.g.shape[1], rows.shape[1], dtype=torch.float32, device=rows.device)
        _add_product(gradient, self.g.t(), rows.to(self.g.dtype), True)
        dweight[self.first :] = gradient[: self.end - self.first]


def _product(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Adds a @ b to ``total`` (fp32), or writes it there the first time; 16-bit products are not rounded in between."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=total) if first else torch.addmm(total, a, b, out=total)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


# ---- rows picked out of all ------------------------------------------------------------------------------------------


def gather_triton(rows: Tensor, positions: Tensor, out: Tensor, errors: Tensor) -> None:
    from fasttfm.kernels.vocabulary import triton_pick_rows

    triton_pick_rows.gather(rows, positions, out, errors)


def scale(total: Tensor, factor: Tensor, out: Tensor, triton: bool) -> None:
    """out = total * factor, rounded once; contiguous tensors, and a factor of one element."""
    if not triton:
        torch.mul(total, factor, out=out)
        return
    from fasttfm.kernels.vocabulary import triton_scale

    triton_scale.scale(total, factor, out)


def scatter_triton(*args: Any) -> None:
    from fasttfm.kernels.vocabulary import triton_pick_rows

    triton_pick_rows.scatter(*args)


def rows_triton(hidden: Tensor, positions: Tensor | None, errors: Tensor) -> Tensor:
    """The rows of hidden [..., C] at ``positions``, or all: [N, C]."""
    rows = as_rows(hidden)
    if positions is None:
        return rows
    picked = torch.empty(len(positions), rows.shape[1], dtype=rows.dtype, device=rows.device)
    gather_triton(rows, positions, picked, errors)
    return picked


def padded_bias(bias: Tensor) -> Tensor:
    """The bias, padded to the length of the logits' rows in memory, so that kernels read it in whole vectors."""
    return torch.nn.functional.pad(bias, (0, padded(len(bias)) - len(bias)))


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_matrices(op: str, hidden: Any, weight: Any, bias: Any) -> None:
    checks.check_floating(op, "hidden", hidden)
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise checks.bad_value(op, "hidden", "at least one dimension and one column", f"shape {tuple(hidden.shape)}")
    linear.check_weight(op, "weight", weight, hidden.shape[-1], hidden, like="hidden")
    linear.check_bias(op, "bias", bias, weight, hidden, like="hidden")


def check_indices(op: str, argument: str, indices: Any, shape: Sequence[int] | None, like: Tensor) -> None:
    """``indices`` is an integer tensor of this shape, or of any."""
    checks.check_index(op, argument, indices)
    if shape is not None:
        checks.check_shape(op, argument, indices, shape)
    checks.check_device(op, argument, indices, like=like)


def check_loss(
    op: str, reduction: Any, label_smoothing: Any, z_loss: Any, ignore_index: Any, total: Any, like: Tensor
) -> None:
    check_reduction(op, reduction, total, like)
    checks.check_number(op, "label_smoothing", label_smoothing, low=0.0, high=1.0)
    checks.check_number(op, "z_loss", z_loss, low=0.0, high=float("inf"))
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, torch.SymInt)):
        raise checks.bad_type(op, "ignore_index", "an integer", type(ignore_index).__name__)


def check_reduction(op: str, reduction: Any, total: Any, like: Tensor) -> None:
    if reduction not in REDUCTIONS:
        raise checks.bad_value(op, "reduction", f"one of {', '.join(REDUCTIONS)}", repr(reduction))
    if total is None:
        return
    if reduction != "mean":
        raise checks.bad_value(op, "total", f'None with reduction "{reduction}"', "a number")
    if not isinstance(total, Tensor):
        checks.check_number(op, "total", total, low=0, high=float("inf"))
        return
    if total.numel() != 1:
        raise checks.bad_value(op, "total", "one element", f"shape {tuple(total.shape)}")
    if total.dtype == torch.bool or total.is_complex():
        raise checks.bad_type(op, "total", "a tensor of numbers", dtype_name(total.dtype))
    checks.check_device(op, "total", total, like=like)


def check_values(op: str, argument: str, indices: Tensor, limit: int, ignored: int | None = None) -> None:
    """Raises on the CPU if an index is neither in [0, limit) nor ``ignored``. On a GPU the kernels check the
    indices."""
    if indices.device.type != "cpu" or indices.numel() == 0:
        return
    bad = (indices < 0) | (indices >= limit)
    if ignored is not None:
        bad &= indices != ignored
    if bool(bad.any()):
        at = bad.nonzero()[0].tolist()
        where = at[0] if len(at) == 1 else at
        expected = f"indices in [0, {limit})" + ("" if ignored is None else f" or {ignored}")
        raise checks.bad_value(op, argument, expected, f"{int(indices[tuple(at)])} at {where}")
