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
from fasttfm.ops import checks, linear, vocabulary
from fasttfm.ops.backends import (
    Backend,
    BackendTable,
    refuse_native_cpu,
    refuse_triton,
    requested,
    torch_reference,
    triton_absent,
)
from fasttfm.ops.library import OpFunction, needs_gradient, register, schema_of, unshared
from fasttfm.ops.linear_cross_entropy import scaled_gradients

OP = "distillation_loss"
_errors = IndexErrors(OP, ("labels", "positions"))


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
    checks.check_number(OP, "temperature", temperature, low=0.0, high=float("inf"), low_open=True)
    vocabulary.check_reduction(OP, reduction, total, like=student_hidden)
    TABLE.check_name(backend)
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
        found: Tensor = _Distillation.apply(*rows, divisor, reduction, requested(backend))
    else:
        losses, *_ = forward_op(*rows, [False] * 3, requested(backend))
        found = cross_entropy.reduced(losses, reduction, divisor)
    return found.reshape(shape) if reduction == "none" else found


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_student(hidden: Any, weight: Any, bias: Any) -> None:
    checks.check_floating(OP, "student_hidden", hidden)
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        expected = "at least one dimension and one column"
        raise checks.bad_value(OP, "student_hidden", expected, f"shape {tuple(hidden.shape)}")
    linear.check_weight(OP, "student_weight", weight, hidden.shape[-1], hidden, like="student_hidden")
    linear.check_bias(OP, "student_bias", bias, weight, hidden, like="student_hidden")


def _check_teacher(hidden: Tensor, weight: Tensor, teacher: Any, teacher_weight: Any, teacher_bias: Any) -> None:
    checks.check_floating(OP, "teacher", teacher)
    checks.check_device(OP, "teacher", teacher, like=hidden)
    columns = teacher.shape[-1] if teacher.dim() > 0 else 0
    if teacher.shape[:-1] != hidden.shape[:-1] or columns == 0 or (teacher_weight is None and columns != len(weight)):
        expected = (*hidden.shape[:-1], len(weight) if teacher_weight is None else "any")
        raise checks.bad_value(OP, "teacher", f"shape {expected}", f"shape {tuple(teacher.shape)}")
    if teacher_weight is not None:
        linear.check_weight(OP, "teacher_weight", teacher_weight, columns, teacher, like="teacher")
        checks.check_shape(OP, "teacher_weight", teacher_weight, (len(weight), columns))
    linear.check_bias(OP, "teacher_bias", teacher_bias, weight, teacher, like="teacher")
    checks.check_double(OP, student_hidden=hidden, teacher=teacher)


def _check_rows(hidden: Tensor, positions: Any, mask: Any) -> torch.Size:
    """The shape of the rows that are looked at."""
    shape = hidden.shape[:-1]
    if positions is not None:
        vocabulary.check_indices(OP, "positions", positions, None, like=hidden)
        shape = positions.shape
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise checks.bad_type(OP, "mask", "a tensor or None", type(mask).__name__)
        checks.check_shape(OP, "mask", mask, shape)
        checks.check_device(OP, "mask", mask, like=hidden)
    return shape


# ---- autograd --------------------------------------------------------------------------------------------------------


class _Distillation(OpFunction):
    """A mean's or a sum's incoming gradient is one number: the forward, which has the logits at hand, makes the
    gradients of the sum, and the backward multiplies them. With "none" the backward computes the logits again."""

    op = OP
    instead = "torch.nn.functional.linear and kl_div"

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *given, divisor, reduction, backend = arguments
        rows = DistillationRows(*given)
        ctx.wanted = list(ctx.needs_input_grad[:3])
        ctx.options = (rows.temperature, reduction, backend)
        ctx.shape, ctx.dtype = rows.student_hidden.shape, rows.student_hidden.dtype
        now = ctx.wanted if reduction != "none" else [False] * 3
        losses, *gradients = forward_op(*rows, now, backend)
        kept = rows[:6] if reduction == "none" else (divisor, *gradients)
        ctx.save_for_backward(rows.counted, *unshared(rows.positions), *kept)
        return cross_entropy.reduced(losses, reduction, divisor)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        temperature, reduction, backend = ctx.options
        counted, positions, *kept = ctx.saved_tensors
        if reduction == "none":
            rows = DistillationRows(*kept, counted, positions, dloss.contiguous(), temperature)
            _, *totals = forward_op(*rows, ctx.wanted, backend)
            scale = torch.ones((), dtype=dloss.dtype, device=dloss.device)
        else:
            divisor, *totals = kept
            scale = dloss if divisor is None else dloss / divisor.to(dloss.dtype)
        layout = (counted, positions, ctx.shape, ctx.dtype, 0)  # a row that does not count is marked with 0
        return *scaled_gradients(totals, scale, layout, ctx.wanted, OP, backend), *([None] * 10)


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *given, wanted, backend = arguments
    rows = DistillationRows(*given)
    if rows.positions is not None:
        vocabulary.check_values(OP, "positions", rows.positions, rows.student_hidden.shape[:-1].numel())
    results: tuple[Tensor, ...] = TABLE.select(backend, rows.student_hidden, rows.teacher).forward(rows, wanted)
    return results


def _forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    *given, wanted, _ = arguments
    student_hidden, student_weight, *_, counted, _, _, _ = given
    wide = accumulation_type(student_hidden)
    count, (want_dh, want_dweight, want_dbias) = counted.shape[0], wanted
    return (
        student_hidden.new_empty(count, dtype=wide),
        student_hidden.new_empty((count, student_hidden.shape[-1]) if want_dh else 0),
        student_hidden.new_empty(student_weight.shape if want_dweight else 0, dtype=wide),
        student_hidden.new_empty(student_weight.shape[0] if want_dbias else 0, dtype=wide),
    )


forward_op = register(
    f"distillation_loss_forward({schema_of(DistillationRows)}, bool[] wanted, str? backend)"
    " -> (Tensor losses, Tensor dh, Tensor dweight, Tensor dbias)",
    _forward,
    _forward_fake,
)


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


def _forward_native(given: DistillationRows, wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    student_hidden, student_weight, student_bias, teacher, teacher_weight, teacher_bias = given[:6]
    counted, positions, coefficients, temperature = given[6:]
    losses = torch.empty(len(counted), dtype=torch.float32, device="cpu")
    biases = [_native.as_parameter(bias, torch.float32) for bias in (student_bias, teacher_bias)]
    teacher_logits = _TeacherLogits(teacher, teacher_weight, positions, len(student_weight))
    core, gradient = _native.core(), any(wanted)

    def turn(first: int, logits: Tensor) -> None:
        others = teacher_logits.block(first, logits, None)
        core.distillation_loss_cpu(
            *(logits, others, *biases, counted, coefficients, losses),
            *(first, len(student_weight), temperature, gradient),
        )

    rows = pick_rows.gather(student_hidden, positions)
    columns, own = len(student_weight), positions is not None
    return losses, *vocabulary.stream(rows, student_weight, turn, wanted, columns=columns, into_rows=own)


def _forward_triton(given: DistillationRows, wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    from fasttfm.kernels.distillation_loss import triton

    student_hidden, student_weight, student_bias, teacher, teacher_weight, teacher_bias = given[:6]
    counted, positions, coefficients, temperature = given[6:]
    device = student_hidden.device
    _errors.raise_if_seen(device)
    errors = _errors.words(device)
    losses = torch.empty(len(counted), dtype=torch.float32, device=device)
    biases = [None if bias is None else vocabulary.padded_bias(bias) for bias in (student_bias, teacher_bias)]
    teacher_logits = _TeacherLogits(teacher, teacher_weight, positions, len(student_weight))

    def turn(first: int, logits: Tensor) -> None:
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
            any(wanted),
        )

    rows = vocabulary.rows_triton(student_hidden, positions, errors)
    columns, own = vocabulary.padded(len(student_weight)), positions is not None
    gradients = vocabulary.stream(rows, student_weight, turn, wanted, columns=columns, into_rows=own, split=True)
    _errors.watch(device)
    return losses, *gradients


# The CPU core comes before Triton, so that Triton's interpreter runs on CPU tensors only if it is requested by name.
TABLE = BackendTable(
    OP,
    (
        Backend("cpu", _native.missing, refuse_native_cpu, _forward_native, pick_rows.scatter),
        Backend("triton", triton_absent, refuse_triton, _forward_triton, vocabulary.scatter_triton),
        torch_reference(reference.distillation_loss_forward, pick_rows.scatter),
    ),
)
