"""Divergence of a block of student logits from the teacher's in Triton, its gradient written over the student's; the
formulas are in reference.py.

A program takes one row and makes two passes over both rows of logits: for the two denominators, and for loss and
gradient. Both buffers have rows P >= V columns apart, P a multiple of 64. Loads and stores extend to P, because a mask
that ends at V would split them into single elements. Columns from V on are read as minus infinity and written as zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.common.launch import ahead_of_time, next_power_of_2, on_device
from fasttfm.kernels.common.triton.launcher import launched_kernel
from fasttfm.kernels.vocabulary.triton_softmax import LOWEST, added, exponential, total


@triton.jit
def _logits_at(line, bias, columns, V, P, inverse_temperature, HAS_BIAS: tl.constexpr):
    """fp32 logits of a row over the temperature, at these columns; minus infinity from V on."""
    x = tl.load(line + columns, mask=columns < P, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + columns, mask=columns < P, other=0.0).to(tl.float32)
    return tl.where(columns < V, x * inverse_temperature, float("-inf"))


@launched_kernel
@triton.jit
def _loss_kernel(
    student,  # [n, P]; overwritten by the gradient
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
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = student + row * P
    other = teacher + row * P
    row += first_row
    GROUPS: tl.constexpr = BLOCK_V // GROUP
    PRECISE: tl.constexpr = (student.dtype.element_ty == tl.float32) or (teacher.dtype.element_ty == tl.float32)
    block = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    if tl.load(counted + row) == 0:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for start in range(0, P, BLOCK_V):
                columns = start + block
                tl.store(line + columns, tl.zeros([GROUPS, GROUP], student.dtype.element_ty), mask=columns < P)
    else:
        inverse = 1.0 / temperature
        s_sums = tl.zeros([GROUPS], tl.float32)
        t_sums = tl.zeros([GROUPS], tl.float32)
        s_maxima = s_sums + LOWEST
        t_maxima = t_sums + LOWEST
        for start in range(0, P, BLOCK_V):
            columns = start + block
            s = _logits_at(line, student_bias, columns, V, P, inverse, HAS_STUDENT_BIAS)
            t = _logits_at(other, teacher_bias, columns, V, P, inverse, HAS_TEACHER_BIAS)
            s_sums, s_maxima = added(s_sums, s_maxima, s, PRECISE)
            t_sums, t_maxima = added(t_sums, t_maxima, t, PRECISE)
        s_sum, s_largest = total(s_sums, s_maxima, PRECISE)
        t_sum, t_largest = total(t_sums, t_maxima, PRECISE)
        offset = tl.log(s_sum) - tl.log(t_sum)

        factor = temperature
        if HAS_COEFFICIENTS:
            factor *= tl.load(coefficients + row).to(tl.float32)
        s_factor = factor / s_sum
        t_factor = factor / t_sum
        divergence = tl.zeros([GROUPS], tl.float32)
        for start in range(0, P, BLOCK_V):
            columns = start + block
            s = _logits_at(line, student_bias, columns, V, P, inverse, HAS_STUDENT_BIAS) - s_largest
            t = _logits_at(other, teacher_bias, columns, V, P, inverse, HAS_TEACHER_BIAS) - t_largest
            share = exponential(t, PRECISE)
            divergence += tl.sum(tl.where(share > 0, share * ((t - s) + offset), 0.0), axis=1)
            if GRADIENT:
                g = exponential(s, PRECISE) * s_factor - share * t_factor
                g = tl.where(columns < V, g, 0.0).to(student.dtype.element_ty)
                tl.store(line + columns, g, mask=columns < P)
        loss = tl.div_rn(tl.sum(divergence, axis=0), t_sum)
        tl.store(losses + row, temperature * temperature * loss)


def _tile(columns: int, element_bytes: int) -> dict[str, int]:
    """16 bytes of each of the two rows per thread and load; the few rows in flight fit into L2."""
    group = 16 // element_bytes
    block_v = min(512 * group, next_power_of_2(columns))
    return {"BLOCK_V": block_v, "GROUP": group, "num_warps": max(1, block_v // (32 * group))}


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
            **_tile(student.stride(0), student.element_size()),
        )


def compile_signatures(columns: int, element: str) -> list[dict[str, object]]:
    """The kernel as it is compiled for rows of ``columns`` logits."""
    tile = _tile(columns, 4 if element == "fp32" else 2)
    e, f = f"*{element}", "*fp32"
    pointers = {"student": e, "teacher": e, "student_bias": e, "teacher_bias": e, "counted": "*i32", "coefficients": f}
    numbers = dict.fromkeys(("first_row", "V", "P"), "i32")
    flags = ("HAS_STUDENT_BIAS", "HAS_TEACHER_BIAS", "HAS_COEFFICIENTS", "GRADIENT")
    signature = {**pointers, "losses": f, **numbers, "temperature": "fp32"}
    return [ahead_of_time(_loss_kernel, signature, tile, **dict.fromkeys(flags, True))]
