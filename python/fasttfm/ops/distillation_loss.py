"""``distillation_loss``: the divergence of a student's distribution from a teacher's, over a vocabulary whose logits
are never all in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.index_errors import IndexErrors
from fasttfm.kernels.common.linear import accumulation_type
from fasttfm.kernels.common.rows import as_rows
from fasttfm.kernels.distillation_loss import reference
from fasttfm.kernels.distillation_loss.reference import DistillationRows
from fasttfm.kernels.vocabulary import cross_entropy, pick_rows
from fasttfm.ops import linear, vocabulary
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import converted, fields, outputs
from fasttfm.ops.core.backends import (
    Backend,
    refuse_native_cpu,
    refuse_triton,
    requested,
    torch_reference,
    triton_absent,
)
from fasttfm.ops.core.declare import ForwardOp
from fasttfm.ops.core.library import OpFunction, needs_gradient, unshared
from fasttfm.ops.linear_cross_entropy import scaled_gradients, sum_gradients

NAME = "distillation_loss"
_errors = IndexErrors(NAME, ("labels", "positions"))


def distillation_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher: Tensor,
    teacher_weight: Tensor | None = None,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    positions: Tensor | None = None,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    reduction: str = "mean",
    total: Tensor | float | None = None,
    backend: str | None = None,
) -> Tensor:
    """``temperature^2 * KL(softmax(teacher / temperature) || softmax(student / temperature))`` of rows of logits.

    Args:
        student_hidden: ``[..., C]``, fp32, bf16 or fp16 (fp64 on the reference backend).
        student_weight: ``[V, C]`` in the same type.
        teacher: The teacher's hidden rows ``[..., D]`` with ``teacher_weight``, else its logits ``[..., V]``. Gets no
            gradient.
        teacher_weight: ``[V, D]`` in ``teacher``'s type, or None.
        student_bias: ``[V]`` in the student's type, or None.
        teacher_bias: ``[V]`` in the teacher's type, or None.
        positions: The rows that are looked at, numbers in ``student_hidden`` seen as ``[T, C]`` and in ``teacher``
            alike; int64 or int32, of any shape and order. By default all.
        mask: True (or not 0) for rows that count; in the shape of ``positions``, or without them in the leading shape
            of ``student_hidden``. By default all do.
        temperature: Above 0; above 1 the teacher's small probabilities weigh more.
        reduction: "mean" over the rows that count, "sum", or "none" for a loss in the mask's shape.
        total: The divisor of a mean, instead of the number of rows that count: a number, or a tensor of one element,
            which is not read on the host.
        backend: Requests one backend; by default the first that supports the call runs it.

    Returns:
        The loss in fp32 (fp64 for fp64), 0 where no row counts. Under autocast everything is cast to its type first, as
        around ``torch.nn.Linear``.

    Raises:
        ValueError: For a position outside ``student_hidden``. On the CPU this call raises. On a GPU the loss is NaN,
            and a later call or ``fasttfm.ops.check_errors()`` raises.
    """
    student_hidden, student_weight, student_bias = linear.autocast(student_hidden, student_weight, student_bias)
    teacher, teacher_weight, teacher_bias = linear.autocast(teacher, teacher_weight, teacher_bias)
    _check_student(student_hidden, student_weight, student_bias)
    _check_teacher(student_hidden, student_weight, teacher, teacher_weight, teacher_bias)
    shape = _check_rows(student_hidden, positions, mask)
    checks.check_number(NAME, "temperature", temperature, low=0.0, high=float("inf"), low_open=True)
    vocabulary.check_reduction(NAME, reduction, total, like=student_hidden)
    OP.table.check_name(backend)
    if mask is None:
        counted = torch.ones(shape.numel(), dtype=torch.int32, device=student_hidden.device)
    else:
        counted = (mask != 0).flatten().to(torch.int32)
    divisor = None
    if reduction == "mean":
        divisor = cross_entropy.divisor(counted, total, ignore_index=0).to(torch.float32)
    selected = None if positions is None else positions.flatten()
    student = (student_hidden, student_weight, student_bias)
    others = (teacher.detach(), *(None if x is None else x.detach() for x in (teacher_weight, teacher_bias)))
    rows = DistillationRows(*student, *others, counted, selected, None, float(temperature))
    if needs_gradient(*student):
        loss: Tensor = _Distillation.apply(*rows, divisor, reduction, requested(backend))
    else:
        losses, *_ = OP.forward(*rows, [False] * 3, requested(backend))
        loss = cross_entropy.reduced(losses, reduction, divisor)
    return loss.reshape(shape) if reduction == "none" else loss


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_student(hidden: Any, weight: Any, bias: Any) -> None:
    checks.check_floating(NAME, "student_hidden", hidden)
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        expected = "at least one dimension and one column"
        raise checks.bad_value(NAME, "student_hidden", expected, f"shape {tuple(hidden.shape)}")
    linear.check_weight(NAME, "student_weight", weight, hidden.shape[-1], hidden, like="student_hidden")
    linear.check_bias(NAME, "student_bias", bias, weight, hidden, like="student_hidden")


def _check_teacher(hidden: Tensor, weight: Tensor, teacher: Any, teacher_weight: Any, teacher_bias: Any) -> None:
    checks.check_floating(NAME, "teacher", teacher)
    checks.check_device(NAME, "teacher", teacher, like=hidden)
    columns = teacher.shape[-1] if teacher.dim() > 0 else 0
    if teacher.shape[:-1] != hidden.shape[:-1] or columns == 0 or (teacher_weight is None and columns != len(weight)):
        expected = (*hidden.shape[:-1], len(weight) if teacher_weight is None else "any")
        raise checks.bad_value(NAME, "teacher", f"shape {expected}", f"shape {tuple(teacher.shape)}")
    if teacher_weight is not None:
        linear.check_weight(NAME, "teacher_weight", teacher_weight, columns, teacher, like="teacher")
        checks.check_shape(NAME, "teacher_weight", teacher_weight, (len(weight), columns))
    linear.check_bias(NAME, "teacher_bias", teacher_bias, weight, teacher, like="teacher")
    checks.check_double(NAME, student_hidden=hidden, teacher=teacher)


def _check_rows(hidden: Tensor, positions: Any, mask: Any) -> torch.Size:
    """The shape of the rows that are looked at."""
    shape = hidden.shape[:-1]
    if positions is not None:
        vocabulary.check_indices(NAME, "positions", positions, None, like=hidden)
        shape = positions.shape
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise checks.bad_type(NAME, "mask", "a tensor or None", type(mask).__name__)
        checks.check_shape(NAME, "mask", mask, shape)
        checks.check_device(NAME, "mask", mask, like=hidden)
    return shape


# ---- autograd --------------------------------------------------------------------------------------------------------


class _Distillation(OpFunction):
    """A mean's or a sum's incoming gradient is one number: the forward, which has the logits at hand, makes the
    gradients of the sum, and the backward multiplies them. With "none" the backward computes the logits again."""

    op = NAME
    instead = "torch.nn.functional.linear and kl_div"

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *passed, divisor, reduction, backend = arguments
        rows = DistillationRows(*passed)
        ctx.needed = list(ctx.needs_input_grad[:3])
        ctx.options = (rows.temperature, reduction, backend)
        ctx.shape, ctx.dtype = rows.student_hidden.shape, rows.student_hidden.dtype
        now = ctx.needed if reduction != "none" else [False] * 3
        losses, *gradients = OP.forward(*rows, now, backend)
        kept = rows[:6] if reduction == "none" else (divisor, *gradients)
        ctx.save_for_backward(rows.counted, *unshared(rows.positions), *kept)
        return cross_entropy.reduced(losses, reduction, divisor)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        temperature, reduction, backend = ctx.options
        counted, positions, *kept = ctx.saved_tensors
        if reduction == "none":
            rows = DistillationRows(*kept, counted, positions, dloss.contiguous(), temperature)
            _, *totals = OP.forward(*rows, ctx.needed, backend)
            scale = torch.ones((), dtype=dloss.dtype, device=dloss.device)
        else:
            divisor, *totals = kept
            scale = dloss if divisor is None else dloss / divisor.to(dloss.dtype)
        layout = (counted, positions, ctx.shape, ctx.dtype, 0)  # a row that does not count is marked with 0
        return *scaled_gradients(totals, scale, layout, ctx.needed, NAME, backend), *([None] * 10)


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *passed, needed, backend = arguments
    rows = DistillationRows(*passed)
    if rows.positions is not None:
        vocabulary.check_values(NAME, "positions", rows.positions, rows.student_hidden.shape[:-1].numel())
    results: tuple[Tensor, ...] = OP.table.select(backend, rows.student_hidden, rows.teacher).forward(rows, needed)
    return results


def _make_results(*arguments: Any) -> tuple[Tensor, ...]:
    *passed, needed, _ = arguments
    rows = DistillationRows(*passed)
    hidden, count = rows.student_hidden, rows.counted.shape[0]
    losses = hidden.new_empty(count, dtype=accumulation_type(hidden))
    return losses, *sum_gradients(hidden, rows.student_weight, count, needed)


# ---- backends --------------------------------------------------------------------------------------------------------


class _TeacherLogits:
    """A block of the teacher's logits after the other, in one buffer: products, or copies of given ones, whose rows may
    start anywhere."""

    def __init__(self, teacher: Tensor, weight: Tensor | None, positions: Tensor | None, tokens: int) -> None:
        self.rows, self.positions, self.tokens = as_rows(teacher), positions, tokens
        self.dtype = vocabulary.product_type(teacher)
        self.weight = None if weight is None else weight.to(self.dtype)
        self.buffer: Tensor | None = None

    def block(self, first: int, like: Tensor, errors: Tensor | None) -> Tensor:
        """The teacher's block, with as many rows and columns in memory as the student's, ``like``."""
        count = len(like)
        if self.buffer is None:  # the first block is the largest
            self.buffer = torch.empty(like.shape, dtype=self.dtype, device=like.device)
        block = self.buffer[:count]
        logits = block[:, : self.tokens]
        chosen = slice(first, first + count)
        if self.weight is not None:
            rows = self._picked(chosen, errors).to(self.dtype)
            if errors is None:
                torch.mm(rows, self.weight.t(), out=logits)
            else:
                vocabulary.logits_split(rows, self.weight, logits)
        elif self.positions is None or errors is None:
            logits.copy_(self._picked(chosen, errors))
        else:
            vocabulary.gather_triton(self.rows, self.positions[chosen], logits, errors)
        return block

    def _picked(self, chosen: slice, errors: Tensor | None) -> Tensor:
        if self.positions is None:
            return self.rows[chosen]
        if errors is None:
            return pick_rows.gather(self.rows, self.positions[chosen])
        picked = torch.empty(
            chosen.stop - chosen.start, self.rows.shape[1], dtype=self.rows.dtype, device=errors.device
        )
        vocabulary.gather_triton(self.rows, self.positions[chosen], picked, errors)
        return picked


def _forward_native(inputs: DistillationRows, needed: Sequence[bool]) -> tuple[Tensor, ...]:
    student_hidden, student_weight, student_bias, teacher, teacher_weight, teacher_bias = inputs[:6]
    counted, positions, coefficients, temperature = inputs[6:]
    losses = torch.empty(len(counted), dtype=torch.float32, device="cpu")
    biases = [_native.as_parameter(bias, torch.float32) for bias in (student_bias, teacher_bias)]
    teacher_logits = _TeacherLogits(teacher, teacher_weight, positions, len(student_weight))
    core, gradient = _native.core(), any(needed)

    def visit(first: int, logits: Tensor) -> None:
        others = teacher_logits.block(first, logits, None)
        core.distillation_loss_cpu(
            *(logits, others, *biases, counted, coefficients, losses),
            *(first, len(student_weight), temperature, gradient),
        )

    rows = pick_rows.gather(student_hidden, positions)
    columns, into_rows = len(student_weight), positions is not None
    return losses, *vocabulary.stream(rows, student_weight, visit, needed, columns=columns, into_rows=into_rows)


def _forward_triton(inputs: DistillationRows, needed: Sequence[bool]) -> tuple[Tensor, ...]:
    from fasttfm.kernels.distillation_loss import triton

    student_hidden, student_weight, student_bias, teacher, teacher_weight, teacher_bias = inputs[:6]
    counted, positions, coefficients, temperature = inputs[6:]
    device = student_hidden.device
    _errors.raise_if_seen(device)
    errors = _errors.words(device)
    losses = torch.empty(len(counted), dtype=torch.float32, device=device)
    biases = [None if bias is None else vocabulary.padded_bias(bias) for bias in (student_bias, teacher_bias)]
    teacher_logits = _TeacherLogits(teacher, teacher_weight, positions, len(student_weight))

    def visit(first: int, logits: Tensor) -> None:
        others = teacher_logits.block(first, logits, errors)
        triton.distillation_loss_triton(
            logits,
            others,
            len(student_weight),
            *biases,
            counted,
            coefficients,
            losses,
            first,
            temperature,
            any(needed),
        )

    rows = vocabulary.rows_triton(student_hidden, positions, errors)
    columns, into_rows = vocabulary.padded(len(student_weight)), positions is not None
    gradients = vocabulary.stream(rows, student_weight, visit, needed, columns=columns, into_rows=into_rows, split=True)
    _errors.watch(device)
    return losses, *gradients


# The CPU core comes before Triton, so that Triton's interpreter runs on CPU tensors only if it is requested by name.
_ROWS = fields(DistillationRows)
OP = ForwardOp(
    NAME,
    registered=f"{NAME}_forward",
    inputs=_ROWS[:-1],
    options=(_ROWS[-1], converted("needed", "bool[]")),
    output=outputs("losses", "dh", "dweight", "dbias", make=_make_results),
    run=_forward,
    backends=(
        Backend("cpu", _native.missing, refuse_native_cpu, _forward_native, pick_rows.scatter),
        Backend("triton", triton_absent, refuse_triton, _forward_triton, vocabulary.scatter_triton),
        torch_reference(reference.distillation_loss_forward, pick_rows.scatter),
    ),
)
