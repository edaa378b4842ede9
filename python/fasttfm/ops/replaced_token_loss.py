"""``replaced_token_loss``: the loss of ELECTRA's discriminator, on real tokens only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.replaced_token_loss import reference
from fasttfm.kernels.vocabulary import cross_entropy
from fasttfm.ops import vocabulary
from fasttfm.ops.core import checks
from fasttfm.ops.core.arguments import checked, indices, wide_like_first
from fasttfm.ops.core.backends import dtype_name, torch_reference
from fasttfm.ops.core.declare import Op

NAME = "replaced_token_loss"


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
        backend: Requests one backend; by default the first that supports the call runs it.

    Returns:
        The loss in fp32 (fp64 for fp64), 0 where no token counts.

    Raises:
        ValueError: For a label other than 0 and 1 of a token that counts. On the CPU this call raises. On a GPU the
            loss is NaN: a call never synchronizes with the GPU.
    """
    _check(logits, labels, mask, lengths)
    vocabulary.check_reduction(NAME, reduction, total, like=logits)
    counted = reference.counted_tokens(logits, mask, lengths)
    losses: Tensor = OP.apply(logits, labels, counted, backend=backend)
    divisor = cross_entropy.divisor(counted, total, ignore_index=0) if reduction == "mean" else None
    return cross_entropy.reduced(losses, reduction, divisor)


def _check(logits: Any, labels: Any, mask: Any, lengths: Any) -> None:
    checks.check_floating(NAME, "logits", logits)
    if logits.dim() == 0:
        raise checks.bad_value(NAME, "logits", "at least one dimension", "none")
    for name, tensor in (("labels", labels), ("mask", mask)):
        if tensor is None and name == "mask":
            continue
        if not isinstance(tensor, Tensor):
            raise checks.bad_type(NAME, name, "a tensor", type(tensor).__name__)
        checks.check_shape(NAME, name, tensor, logits.shape)
        checks.check_device(NAME, name, tensor, like=logits)
    if labels.is_floating_point() or labels.is_complex():
        raise checks.bad_type(NAME, "labels", "a tensor of bool or integers", dtype_name(labels.dtype))
    if lengths is not None:
        checks.check_index(NAME, "lengths", lengths)
        checks.check_shape(NAME, "lengths", lengths, logits.shape[:-1])
        checks.check_device(NAME, "lengths", lengths, like=logits)


def _check_values(logits: Tensor, labels: Tensor, counted: Tensor) -> None:
    if labels.dtype != torch.bool:
        vocabulary.check_values(NAME, "labels", torch.where(counted, labels, 0), 2)


OP = Op(
    NAME,
    inputs=(checked("logits"), indices("labels"), checked("counted")),
    outputs=(wide_like_first("losses"),),
    saves=("logits", "labels", "counted"),
    gradients=("logits",),
    instead="torch.nn.functional.binary_cross_entropy_with_logits",
    check_values=_check_values,
    backends=(torch_reference(reference.replaced_token_loss_forward, reference.replaced_token_loss_backward),),
)
