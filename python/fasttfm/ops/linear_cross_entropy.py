"""``linear_cross_entropy``: a linear layer onto a vocabulary and the cross entropy of its logits, which are never all
in memory; and the engine that ``masked_lm_loss`` shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm import _native
from fasttfm.kernels.common.index_errors import IndexErrors
from fasttfm.kernels.common.linear import accumulation_type
from fasttfm.kernels.linear_cross_entropy import reference
from fasttfm.kernels.vocabulary import cross_entropy, pick_rows
from fasttfm.kernels.vocabulary.cross_entropy import Loss, LossRows
from fasttfm.ops import linear, vocabulary
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import checked, converted, fields, flag, outputs
from fasttfm.ops.core.backends import (
    Backend,
    refuse_native_cpu,
    refuse_triton,
    requested,
    tables,
    torch_reference,
    triton_absent,
)
from fasttfm.ops.core.declare import ForwardOp, define
from fasttfm.ops.core.library import OpFunction, is_plain, needs_gradient, unshared

NAME = "linear_cross_entropy"
_errors = IndexErrors(NAME, ("labels", "positions"))


class CountedLoss(NamedTuple):
    """A loss, and the other outputs that were requested."""

    loss: Tensor
    predictions: Tensor | None = None  # how many labels count: int64 []
    correct: Tensor | None = (
        None  # how many of them have the largest logit, the lowest index among equal ones: int64 []
    )
    samples: Tensor | None = None  # a word drawn for each: int64 in the labels' shape, ignore_index where theirs is


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    shift: bool = False,
    cu_seqlens: Tensor | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    total: Tensor | float | None = None,
    counts: bool = False,
    backend: str | None = None,
) -> Tensor | CountedLoss:
    """Cross entropy of ``hidden weight^T + bias`` against ``labels``, for every row.

    Args:
        hidden: ``[..., C]``, fp32, bf16 or fp16 (fp64 on the reference backend).
        weight: ``[V, C]`` in hidden's type.
        labels: In hidden's leading shape; int64 or int32.
        bias: ``[V]`` in hidden's type, or None.
        shift: Whether a row predicts the label of the next one (causal language models): the last row of each sequence,
            the next to last dimension of ``hidden`` or what ``cu_seqlens`` bounds, then predicts nothing.
        cu_seqlens: int32 ``[sequences + 1]``, for ``shift`` in a packed batch ``[T, C]``.
        reduction: "mean" over the labels that count, "sum", or "none" for a loss in the labels' shape.
        label_smoothing: The share of the target that is spread evenly over the vocabulary, as in torch.
        z_loss: Weight of the squared logarithm of the softmax's denominator.
        ignore_index: A label that does not count.
        total: The divisor of a mean, instead of the number of labels that count: a number, or a tensor of one element,
            which is not read on the host. For batches in parts: the sum of the parts' losses is the whole's mean.
        counts: Whether to return a ``CountedLoss`` with the numbers of predictions and of correct ones.
        backend: Requests one backend; by default the first that supports the call runs it.

    Returns:
        The loss in fp32 (fp64 for fp64), 0 where no label counts. Under autocast everything is cast to its type first,
        as around ``torch.nn.Linear``.

    Raises:
        ValueError: For a label outside the vocabulary. On the CPU this call raises. On a GPU the loss is NaN, and a
            later call or ``fasttfm.ops.check_errors()`` raises: a call never synchronizes with the GPU.
    """
    hidden, weight, bias = linear.autocast(hidden, weight, bias)
    vocabulary.check_matrices(NAME, hidden, weight, bias)
    vocabulary.check_indices(NAME, "labels", labels, hidden.shape[:-1], like=hidden)
    vocabulary.check_loss(NAME, reduction, label_smoothing, z_loss, ignore_index, total, like=hidden)
    _check_shift(hidden, shift, cu_seqlens)
    OP.table.check_name(backend)
    if shift:
        labels = _next_labels(labels, cu_seqlens, ignore_index)
    loss = Loss(ignore_index, float(label_smoothing), float(z_loss), count_correct=counts)
    call = Call(NAME, loss, reduction, requested(backend))
    result = vocabulary_loss(hidden, weight, bias, labels.flatten(), call, total=total)
    loss_value = result.loss.reshape(labels.shape) if reduction == "none" else result.loss
    return CountedLoss(loss_value, result.predictions, result.correct) if counts else loss_value


def _check_shift(hidden: Tensor, shift: Any, cu_seqlens: Any) -> None:
    if not isinstance(shift, bool):
        raise checks.bad_type(NAME, "shift", "True or False", type(shift).__name__)
    if cu_seqlens is not None:
        checks.check_cu_seqlens(NAME, cu_seqlens, like=hidden)
        if not shift:
            raise checks.bad_value(NAME, "cu_seqlens", "None without shift", "a tensor")
        if hidden.dim() != 2:
            raise checks.bad_value(NAME, "hidden", "shape (T, C) with cu_seqlens", f"shape {tuple(hidden.shape)}")
        if is_plain((cu_seqlens,)):
            checks.check_cu_seqlens_values(NAME, cu_seqlens, hidden.shape[0])
    if shift and hidden.dim() < 2:
        raise checks.bad_value(NAME, "hidden", "at least two dimensions with shift", f"shape {tuple(hidden.shape)}")


def _next_labels(labels: Tensor, cu_seqlens: Tensor | None, ignore_index: int) -> Tensor:
    """The label of the next token of the same sequence; ignore_index for its last."""
    following = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)
    if cu_seqlens is None or labels.numel() == 0:
        return following[..., : labels.shape[-1]]
    end = labels.shape[0]
    # If the first sequences are empty there is no token before their end: the last one of any sequence replaces it.
    ends = torch.where(cu_seqlens[1:] > 0, cu_seqlens[1:], end).clamp(max=end).long()
    return following.index_fill(0, ends - 1, ignore_index)


# ---- the engine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """The state that forward and backward share."""

    op: str
    loss: Loss
    reduction: str
    backend: str | None
    counted_first: bool = False  # labels that count come before the others, which need not be computed


def vocabulary_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    call: Call,
    *,
    positions: Tensor | None = None,
    seed: Tensor | None = None,
    total: Tensor | float | None = None,
) -> CountedLoss:
    """The loss of the rows of hidden [..., C] at ``positions`` [N], or of all, against ``labels`` [N]."""
    rows, divisor = LossRows(hidden, weight, bias, labels, positions, seed=seed), None
    if call.reduction == "mean":
        divisor = cross_entropy.divisor(labels, total, call.loss.ignore_index).to(torch.float32)
    if needs_gradient(hidden, weight, bias):
        reduced, correct, samples = _VocabularyLoss.apply(*rows, divisor, call)
    else:
        losses, correct, samples, *_ = _run(rows, call.loss, call, _NOTHING)
        reduced = cross_entropy.reduced(losses, call.reduction, divisor)
    predictions = (labels != call.loss.ignore_index).sum() if call.loss.count_correct else None
    return CountedLoss(
        reduced,
        predictions,
        correct.sum() if call.loss.count_correct else None,
        None if seed is None else samples,
    )


_NOTHING = [False] * 3  # no gradient is needed


def _run(rows: LossRows, loss: Loss, call: Call, needed: Sequence[bool]) -> tuple[Tensor, ...]:
    results: tuple[Tensor, ...] = OP.forward(*rows, *loss, call.counted_first, needed, call.op, call.backend)
    return results


class _VocabularyLoss(OpFunction):
    """A mean's or a sum's incoming gradient is one number: the forward, which has the logits at hand, makes the
    gradients of the sum, and the backward multiplies them. With "none" each row has a factor that only the backward
    knows: it computes the logits again."""

    op = f"{NAME} (masked_lm_loss, contrastive_loss)"
    instead = "torch.nn.functional.linear and cross_entropy"

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, divisor, call = arguments
        rows = LossRows(*tensors)
        ctx.needed = list(ctx.needs_input_grad[:3])
        ctx.call, ctx.shape, ctx.dtype = call, rows.hidden.shape, rows.hidden.dtype
        now = ctx.needed if call.reduction != "none" else _NOTHING
        # On a CPU rows have their share of a mean from the start: where the mean's gradient is 1, nothing is scaled. In
        # fp16 a loss scale has to multiply the share before hidden's gradient is rounded.
        shares = None
        if divisor is not None and divisor.is_cpu and ctx.dtype != torch.float16:
            shares = (call.loss.scale / divisor).expand(rows.labels.shape).contiguous()
        ctx.scale = call.loss.scale if shares is None else 1.0  # what gradients still lack
        losses, correct, samples, *gradients = _run(rows._replace(coefficients=shares), call.loss, call, now)
        indices = unshared(rows.labels, rows.positions)
        if call.reduction == "none":
            ctx.save_for_backward(*indices, rows.hidden, rows.weight, rows.bias)
        else:
            ctx.save_for_backward(*indices, divisor if shares is None else None, *gradients)
        ctx.mark_non_differentiable(correct, samples)
        return cross_entropy.reduced(losses, call.reduction, divisor), correct, samples

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        if call.reduction == "none":
            labels, positions, hidden, weight, bias = ctx.saved_tensors
            rows = LossRows(hidden, weight, bias, labels, positions, dloss.contiguous())
            dh, dweight, dbias = _run(rows, call.loss._replace(count_correct=False), call, ctx.needed)[3:]
            scale = torch.ones((), dtype=dloss.dtype, device=dloss.device)
        else:
            labels, positions, divisor, dh, dweight, dbias = ctx.saved_tensors
            scale = dloss if divisor is None else dloss / divisor.to(dloss.dtype)
        if ctx.scale != 1.0:
            scale = scale * ctx.scale
        layout = (labels, positions, ctx.shape, ctx.dtype, call.loss.ignore_index)
        gradients = scaled_gradients((dh, dweight, dbias), scale, layout, ctx.needed, call.op, call.backend)
        return *gradients, *([None] * 6)


def scaled_gradients(
    totals: Sequence[Tensor],
    scale: Tensor,
    layout: tuple[Any, ...],
    needed: Sequence[bool],
    op: str,
    backend: str | None,
) -> tuple[Tensor | None, ...]:
    """The results of a backward: the sum's gradients dh [N, C], dweight and dbias times ``scale``. ``layout`` are
    labels, positions, hidden's shape and type, and ignore_index."""

    def scaled(now: Sequence[bool]) -> tuple[Tensor, ...]:
        gradients: tuple[Tensor, ...] = backward_op(*totals, scale, *layout, now, op, backend)
        return gradients

    if torch.compiler.is_compiling() or not needed[1]:
        gradients = scaled(needed)
    else:
        # The fp32 sum of dweight, unless a later backward needs it again, becomes the gradient on a CPU, and elsewhere
        # goes before hidden's gradient comes. A tensor subclass need not have memory of its own.
        total, dtype = totals[1], layout[3]
        is_private = type(total) is Tensor and not torch._C._autograd._get_current_graph_task_keep_graph()
        if is_private and total.is_cpu and total.dtype == dtype:
            dhidden, _, dbias = scaled((needed[0], False, needed[2]))
            gradients = (dhidden, total if scale.item() == 1 else total.mul_(scale), dbias)
        else:
            parameters = scaled((False, *needed[1:]))
            if is_private and needed[0]:
                total.untyped_storage().resize_(0)
            gradients = (scaled((needed[0], False, False))[0], *parameters[1:])
    return tuple(gradient if want else None for gradient, want in zip(gradients, needed, strict=True))


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _grouped(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of the registered forward, with the first two groups of them as tuples."""
    rows, both = len(LossRows._fields), len(LossRows._fields) + len(Loss._fields)
    return LossRows(*arguments[:rows]), Loss(*arguments[rows:both]), *arguments[both:]


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    rows, loss, counted_first, needed, op, backend = _grouped(arguments)
    labels, positions = rows.labels, rows.positions
    vocabulary.check_values(op, "labels", labels, len(rows.weight), loss.ignore_index)
    if positions is not None:
        vocabulary.check_values(op, "positions", positions, rows.hidden.shape[:-1].numel())
    chosen = tables()[op].select(backend, rows.hidden, rows.weight)
    used = _used(labels, loss.ignore_index) if counted_first else len(labels)
    if used == len(labels):
        return tuple(chosen.forward(rows, loss, needed))
    assert positions is not None
    head = None if rows.coefficients is None else rows.coefficients[:used]
    some = rows._replace(labels=labels[:used], positions=positions[:used], coefficients=head)
    results = chosen.forward(some, loss, needed)
    # The rows that were not computed: no loss, nothing correct, no sample, no gradient.
    asked, fills = (True, loss.count_correct, rows.seed is not None, needed[0]), (0, 0, loss.ignore_index, 0)
    longer = [
        _lengthened(result, len(labels), fill) if ask else result
        for result, ask, fill in zip(results[:4], asked, fills, strict=True)
    ]
    return *longer, *results[4:]


def _used(labels: Tensor, ignore_index: int) -> int:
    """How many rows come before the labels that do not count. It synchronizes with the GPU, except while a CUDA graph
    is captured: then every row is computed."""
    if labels.is_cuda and torch.cuda.is_current_stream_capturing():
        return len(labels)
    return int((labels != ignore_index).sum())


def _lengthened(part: Tensor, count: int, fill: int) -> Tensor:
    whole = torch.full((count, *part.shape[1:]), fill, dtype=part.dtype, device=part.device)
    whole[: len(part)] = part
    return whole


def _make_results(*arguments: Any) -> tuple[Tensor, ...]:
    rows, loss, _, needed, _, _ = _grouped(arguments)
    hidden, count = rows.hidden, rows.labels.shape[0]
    return (
        hidden.new_empty(count, dtype=accumulation_type(hidden)),
        hidden.new_empty(count if loss.count_correct else 0, dtype=torch.bool),
        hidden.new_empty(0 if rows.seed is None else count, dtype=torch.int64),
        *sum_gradients(hidden, rows.weight, count, needed),
    )


def sum_gradients(hidden: Tensor, weight: Tensor, count: int, needed: Sequence[bool]) -> tuple[Tensor, ...]:
    """Uninitialized gradients of the sum of ``count`` rows' losses: dh, dweight and dbias."""
    wide = accumulation_type(hidden)
    want_dh, want_dweight, want_dbias = needed
    return (
        hidden.new_empty((count, hidden.shape[-1]) if want_dh else 0),
        hidden.new_empty(weight.shape if want_dweight else 0, dtype=wide),
        hidden.new_empty(weight.shape[0] if want_dbias else 0, dtype=wide),
    )


def _backward(
    dh: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    scale: Tensor,
    labels: Tensor,
    positions: Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    ignore_index: int,
    needed: Sequence[bool],
    op: str,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = tables()[op].select(backend, dh, dweight)
    in_triton = chosen.name == "triton"
    # One pass scales from fp32, so that every gradient is rounded once whatever the scale.
    parameters = []
    for total, want in zip((dweight, dbias), needed[1:], strict=True):
        parameters.append(torch.empty(total.shape if want else 0, dtype=dtype, device=dh.device))
        if want:
            vocabulary.scale(total, scale, parameters[-1], in_triton)
    dhidden = dh.new_empty(shape if needed[0] else 0)
    if needed[0] and positions is None:
        vocabulary.scale(dh, scale, dhidden.view(dh.shape), in_triton)
    elif needed[0] and dh.numel() == 0:
        dhidden.zero_()
    elif needed[0]:
        chosen.backward(dh, positions, labels, ignore_index, dhidden.view(-1, dh.shape[1]), scale)
    return dhidden, parameters[0], parameters[1]


def _make_gradients(dh: Tensor, dweight: Tensor, dbias: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, _, shape, dtype, _, needed, _, _ = rest
    return (
        dh.new_empty(shape if needed[0] else 0),
        dweight.new_empty(dweight.shape if needed[1] else 0, dtype=dtype),
        dbias.new_empty(dbias.shape if needed[2] else 0, dtype=dtype),
    )


backward_op = define(
    f"{NAME}_backward",
    (
        *(checked("dh"), checked("dweight"), checked("dbias"), checked("scale"), checked("labels")),
        *(checked("positions", optional=True), converted("shape", "SymInt[]"), converted("dtype", "ScalarType")),
        *(converted("ignore_index", "SymInt"), converted("needed", "bool[]"), converted("op", "str")),
    ),
    outputs("dhidden", "dweight", "dbias", make=_make_gradients),
    _backward,
)


# ---- backends --------------------------------------------------------------------------------------------------------


def _forward_native(inputs: LossRows, loss: Loss, needed: Sequence[bool]) -> tuple[Tensor, ...]:
    hidden, weight, bias, labels, positions, coefficients, seed = inputs
    losses, correct, samples = _outputs(labels, seed, loss)
    labels, bias = labels.long().contiguous(), _native.as_parameter(bias, torch.float32)
    counts, drawn = correct if loss.count_correct else None, None if seed is None else samples
    core, gradient = _native.core(), any(needed)

    def visit(first: int, logits: Tensor) -> None:
        core.linear_cross_entropy_cpu(
            *(logits, bias, labels, coefficients, seed, losses, counts, drawn, first, len(weight)),
            *(loss.ignore_index, loss.label_smoothing, loss.z_loss, loss.temperature, gradient),
        )

    rows = pick_rows.gather(hidden, positions)
    into_rows, limits = positions is not None, {"scale": loss.scale, "block_bytes": loss.block_bytes}
    gradients = vocabulary.stream(rows, weight, visit, needed, columns=len(weight), into_rows=into_rows, **limits)
    return losses, correct, samples, *gradients


def _forward_triton(inputs: LossRows, loss: Loss, needed: Sequence[bool]) -> tuple[Tensor, ...]:
    from fasttfm.kernels.linear_cross_entropy import triton

    hidden, weight, bias, labels, positions, coefficients, seed = inputs
    _errors.raise_if_seen(hidden.device)
    errors = _errors.words(hidden.device)
    outputs = _outputs(labels, seed, loss)
    labels = labels.contiguous()
    bias = None if bias is None else vocabulary.padded_bias(bias)

    def visit(first: int, logits: Tensor) -> None:
        triton.linear_cross_entropy_triton(
            logits, len(weight), bias, labels, coefficients, seed, outputs, first, loss, any(needed), errors
        )

    rows = vocabulary.rows_triton(hidden, positions, errors)
    columns = vocabulary.padded(len(weight))
    into_rows, limits = positions is not None, {"scale": loss.scale, "block_bytes": loss.block_bytes}
    gradients = vocabulary.stream(
        rows, weight, visit, needed, columns=columns, into_rows=into_rows, split=True, **limits
    )
    _errors.watch(hidden.device)
    return *outputs, *gradients


def _outputs(labels: Tensor, seed: Tensor | None, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized losses, correct and samples; outputs that are not requested are empty."""
    count, device = len(labels), labels.device
    return (
        torch.empty(count, dtype=torch.float32, device=device),
        torch.empty(count if loss.count_correct else 0, dtype=torch.bool, device=device),
        torch.empty(0 if seed is None else count, dtype=torch.int64, device=device),
    )


# The CPU core comes before Triton, so that Triton's interpreter runs on CPU tensors only if it is requested by name.
OP = ForwardOp(
    NAME,
    registered=f"{NAME}_forward",
    inputs=fields(LossRows),
    options=(
        *(*fields(Loss, block_bytes="int"), flag("counted_first")),
        *(converted("needed", "bool[]"), converted("op", "str")),
    ),
    output=outputs("losses", "correct", "samples", "dh", "dweight", "dbias", make=_make_results),
    run=_forward,
    backends=(
        Backend("cpu", _native.missing, refuse_native_cpu, _forward_native, pick_rows.scatter),
        Backend("triton", triton_absent, refuse_triton, _forward_triton, vocabulary.scatter_triton),
        torch_reference(reference.linear_cross_entropy_forward, pick_rows.scatter),
    ),
)
