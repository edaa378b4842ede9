"""Divergence of a block of student logits from the teacher's in Triton, its gradient written over the student's; the
formulas are in reference.py.

A program takes one row and sweeps over both rows of logits twice: for the two denominators (online, relative to the
largest logits so far), and for loss and gradient. Both buffers have rows P >= V columns apart, P a multiple of 64, and
loads and stores reach to P: a mask that ended at any V would break them up into single elements. Columns from V on are
read as minus infinity and written as zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import on_device


@triton.jit
def _logits_at(line, bias, columns, V, P, inverse_temperature, HAS_BIAS: tl.constexpr):
    """fp32 logits of a row over the temperature, at these columns; minus infinity from V on."""
    x = tl.load(line + columns, mask=columns < P, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + columns, mask=columns < P, other=0.0).to(tl.float32)
    return tl.where(columns < V, x * inverse_temperature, float("-inf"))


@triton.jit
def _added(sums, largest, x):
    """Sums of exponentials relative to the largest so far, with those of x: the sums and the new largest."""
    largest_now = tl.maximum(largest, tl.max(x, axis=0))
    shift = tl.where(largest_now == float("-inf"), 0.0, largest_now)
    return sums * tl.exp(largest - shift) + tl.exp(x - shift), largest_now


@triton.jit
def _loss_kernel(
    student,  # [n, P]; the gradient after the call, where it is wanted
    teacher,  # [n, P]
    student_bias,  # [P] or unused
    teacher_bias,  # [P] or unused
    counted,  # [N]: 0 for a row that does not count
    coefficients,  # [N] or unused
    losses,  # [N] fp32
    first_row,  # of the n rows among the N
    V,
    P,
    temperature,
    HAS_STUDENT_BIAS: tl.constexpr,
    HAS_TEACHER_BIAS: tl.constexpr,
    HAS_COEFFICIENTS: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = student + row * P
    other = teacher + row * P
    row += first_row
    block = tl.arange(0, BLOCK_V)
    if tl.load(counted + row) == 0:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, P, BLOCK_V):
                columns = start + block
                tl.store(line + columns, tl.zeros([BLOCK_V], student.dtype.element_ty), mask=columns < P)
    else:
        inverse = 1.0 / temperature
        s_largest = float("-inf")
        t_largest = float("-inf")
        s_sums = tl.zeros([BLOCK_V], tl.float32)
        t_sums = tl.zeros([BLOCK_V], tl.float32)
        for start in range(0, P, BLOCK_V):
            columns = start + block
            s = _logits_at(line, student_bias, columns, V, P, inverse, HAS_STUDENT_BIAS)
            t = _logits_at(other, teacher_bias, columns, V, P, inverse, HAS_TEACHER_BIAS)
            s_sums, s_largest = _added(s_sums, s_largest, s)
            t_sums, t_largest = _added(t_sums, t_largest, t)
        s_sum = tl.sum(s_sums, axis=0)
        t_sum = tl.sum(t_sums, axis=0)
        offset = tl.log(s_sum) - tl.log(t_sum)

        factor = temperature
        if HAS_COEFFICIENTS:
            factor *= tl.load(coefficients + row).to(tl.float32)
        divergence = tl.zeros([BLOCK_V], tl.float32)
        for start in range(0, P, BLOCK_V):
            columns = start + block
            s = _logits_at(line, student_bias, columns, V, P, inverse, HAS_STUDENT_BIAS) - s_largest
            t = _logits_at(other, teacher_bias, columns, V, P, inverse, HAS_TEACHER_BIAS) - t_largest
            q = tl.exp(t) / t_sum
            divergence += tl.where(q > 0, q * ((t - s) + offset), 0.0)
            if GRADIENT:
                g = factor * (tl.exp(s) / s_sum - q)
                g = tl.where(columns < V, g, 0.0).to(student.dtype.element_ty)
                tl.store(line + columns, g, mask=columns < P)
        tl.store(losses + row, temperature * temperature * tl.sum(divergence, axis=0))


def _tile(columns: int) -> dict[str, int]:
    """16 elements of each of the two rows for a thread."""
    block_v = min(4096, triton.next_power_of_2(columns))
    return {"BLOCK_V": block_v, "num_warps": max(1, block_v // 512)}


def distillation_loss_triton(
    student: Tensor,
    teacher: Tensor,
    vocabulary: int,
    student_bias: Tensor | None,
    teacher_bias: Tensor | None,
    counted: Tensor,
    coefficients: Tensor | None,
    losses: Tensor,
    first: int,
    temperature: float,
    gradient: bool,
) -> None:
    """One block of rows: logits [n, P] of rows ``first`` and on; ``losses`` are those of all rows."""
    with on_device(student):
        _loss_kernel[(len(student),)](
            student,
            teacher,
            student if student_bias is None else student_bias,
            teacher if teacher_bias is None else teacher_bias,
            counted,
            losses if coefficients is None else coefficients,
            losses,
            first,
            vocabulary,
            student.stride(0),
            temperature,
            HAS_STUDENT_BIAS=student_bias is not None,
            HAS_TEACHER_BIAS=teacher_bias is not None,
            HAS_COEFFICIENTS=coefficients is not None,
            GRADIENT=gradient,
            **_tile(student.stride(0)),
        )


def compile_signatures(columns: int, element: str) -> list[dict[str, object]]:
    """The kernel as it is compiled for rows of ``columns`` logits."""
    tile = _tile(columns)
    e, f = f"*{element}", "*fp32"
    pointers = {"student": e, "teacher": e, "student_bias": e, "teacher_bias": e, "counted": "*i32", "coefficients": f}
    numbers = dict.fromkeys(("first_row", "V", "P"), "i32")
    flags = ("HAS_STUDENT_BIAS", "HAS_TEACHER_BIAS", "HAS_COEFFICIENTS", "GRADIENT")
    return [
        {
            "kernel": _loss_kernel,
            "signature": {**pointers, "losses": f, **numbers, "temperature": "fp32"},
            "num_warps": tile.pop("num_warps"),
            "constants": {**dict.fromkeys(flags, True), **tile},
        }
    ]
