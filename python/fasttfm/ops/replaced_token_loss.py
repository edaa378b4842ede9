"""``replaced_token_loss``: the loss of ELECTRA's discriminator, on real tokens only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.replaced_token_loss import reference
from fasttfm.kernels.vocabulary import cross_entropy
from fasttfm.ops import checks, vocabulary
from fasttfm.ops.backends import Backend, BackendTable, always, dtype_name, requested
from fasttfm.ops.library import OpFunction, needs_gradient, register, unshared

OP = "replaced_token_loss"


def replaced_token_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    reduction: str = "mean",
    total: Tensor | float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Binary cross entropy of each token's logit against whether the token was replaced.

    Args:
        logits: ``[..., S]``, or packed ``[T]``: the logarithm of the odds that a token was replaced; fp32, bf16, fp16
            or fp64.
        labels: In the same shape, 1 (or True) for a replaced token, else 0; bool or integers.
        mask: In the same shape, True (or not 0) for tokens that count; by default all do.
        lengths: ``[...]``, int64 or int32: of each sequence the first tokens count, this many; by default all do.
        reduction: "mean" over the tokens that count, "sum", or "none" for a loss in the logits' shape.
        total: The divisor of a mean, instead of the number of tokens that count: a number, or a tensor of one element,
            which is not read on the host.
        backend: Requests one backend; by default the first that can serve the call does.

    Returns:
        The loss in fp32 (fp64 for fp64), 0 where no token counts.

    Raises:
        ValueError: For a label other than 0 and 1 of a token that counts. On the CPU this call raises. On a GPU the
            loss is NaN: a call never synchronizes with the GPU.
    """
    _check(logits, labels, mask, lengths)
    vocabulary.check_reduction(OP, reduction, total, like=logits)
    TABLE.check_name(backend)
    counted = reference.counted_tokens(logits, mask, lengths)
    asked = requested(backend)
    apply = needs_gradient(logits)
    losses: Tensor = (
        _Losses.apply(logits, labels, counted, asked) if apply else forward_op(logits, labels, counted, asked)
    )
    divisor = cross_entropy.divisor(counted, total, ignore_index=0) if reduction == "mean" else None
    return cross_entropy.reduced(losses, reduction, divisor)


def _check(logits: Any, labels: Any, mask: Any, lengths: Any) -> None:
    checks.check_floating(OP, "logits", logits)
    if logits.dim() == 0:
        raise checks.bad_value(OP, "logits", "at least one dimension", "none")
    for name, given in (("labels", labels), ("mask", mask)):
        if given is None and name == "mask":
            continue
        if not isinstance(given, Tensor):
            raise checks.bad_type(OP, name, "a tensor", type(given).__name__)
        checks.check_shape(OP, name, given, logits.shape)
        checks.check_device(OP, name, given, like=logits)
    if labels.is_floating_point() or labels.is_complex():
        raise checks.bad_type(OP, "labels", "a tensor of bool or integers", dtype_name(labels.dtype))
    if lengths is not None:
        checks.check_index(OP, "lengths", lengths)
        checks.check_shape(OP, "lengths", lengths, logits.shape[:-1])
        checks.check_device(OP, "lengths", lengths, like=logits)


class _Losses(OpFunction):
    op = OP
    instead = "torch.nn.functional.binary_cross_entropy_with_logits"

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, counted: Tensor, backend: str | None) -> Tensor:
        ctx.save_for_backward(logits, *unshared(labels), counted)
        ctx.backend = backend
        losses: Tensor = forward_op(logits, labels, counted, backend)
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor, None, None, None]:
        return backward_op(dlosses, *ctx.saved_tensors, ctx.backend), None, None, None


# ---- torch.library ---------------------------------------------------------------------------------------------------


def _forward(logits: Tensor, labels: Tensor, counted: Tensor, backend: str | None) -> Tensor:
    if labels.dtype != torch.bool:
        vocabulary.check_values(OP, "labels", torch.where(counted, labels, 0), 2)
    losses: Tensor = TABLE.select(backend, logits).forward(logits, labels, counted)
    return losses


def _forward_fake(logits: Tensor, labels: Tensor, counted: Tensor, backend: str | None) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.empty_like(logits, dtype=dtype)


def _backward(dlosses: Tensor, logits: Tensor, labels: Tensor, counted: Tensor, backend: str | None) -> Tensor:
    dlogits: Tensor = TABLE.select(backend, logits).backward(dlosses, logits, labels, counted)
    return dlogits


def _backward_fake(dlosses: Tensor, logits: Tensor, labels: Tensor, counted: Tensor, backend: str | None) -> Tensor:
    return torch.empty_like(logits)


forward_op = register(
    "replaced_token_loss_forward(Tensor logits, Tensor labels, Tensor counted, str? backend) -> Tensor",
    _forward,
    _forward_fake,
)
backward_op = register(
    "replaced_token_loss_backward(Tensor dlosses, Tensor logits, Tensor labels, Tensor counted, str? backend)"
    " -> Tensor",
    _backward,
    _backward_fake,
)

TABLE = BackendTable(
    OP,
    (
        Backend(
            "reference",
            always,
            lambda *_: None,
            reference.replaced_token_loss_forward,
            reference.replaced_token_loss_backward,
        ),
    ),
)
