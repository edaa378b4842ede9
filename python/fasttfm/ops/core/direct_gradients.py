"""Gradients that an op's backward writes to ``parameter.grad`` itself. torch's autograd has a node for each parameter;
these nodes take more host time than the rest of the backward of a model with many parameters and few tokens.

An optimizer enrolls its parameters if its caller asks for it. They are then no inputs of the op's autograd node, so
``torch.autograd.grad`` does not find them, and hooks of their autograd nodes do not run. Hooks of parameters do: a
parameter that has one when the forward runs is an input.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_hooks_of = operator.attrgetter("_backward_hooks")
last_hooks_of = operator.attrgetter("_post_accumulate_grad_hooks")


class Enrolled:
    """Some parameters, for as long as this object is referenced. Those with gradients of another dtype are left out."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [x for x in parameters if getattr(x, "grad_dtype", x.dtype) == x.dtype]
        self.ids = frozenset(map(id, self._parameters))
        _enrolled.add(self)


_enrolled: weakref.WeakSet[Enrolled] = weakref.WeakSet()


def is_accepted(parameters: dict[int, Tensor]) -> bool:
    """Whether a backward may write the gradients of these parameters, by their ids. All of them require a gradient and
    have no hook for the accumulated one."""
    if not _enrolled or torch.is_anomaly_enabled() or set(map(type, parameters.values())) != {nn.Parameter}:
        return False
    ids = parameters.keys()
    return any(ids <= enrolled.ids for enrolled in list(_enrolled)) and not any(map(_hooks_of, parameters.values()))


def witness(x: Tensor) -> Tensor:
    """An input of the autograd node in place of the parameters. It is on x's device, so that autograd's nodes for both
    are on one stream, with which ``backward`` synchronizes its caller's."""
    return torch.empty(0, device=x.device, requires_grad=True, dtype=torch.float32)


def accumulate(ctx: Any, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Adds gradients to those of the parameters, as autograd does. The last input of ``ctx``'s node is the witness:
    autograd reaches it only if it accumulates the gradients of all leaves, not those of requested tensors."""
    node, _ = ctx.next_functions[-1]
    if not torch._C._will_engine_execute_node(node):
        return
    if any(map(_hooks_of, parameters)) or any(map(last_hooks_of, parameters)):
        raise RuntimeError(
            "a hook was added to a parameter of a transformer layer between forward and backward: not supported with"
            " direct_gradients=True"
        )
    totals: Any = []
    terms: Any = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if not parameter.requires_grad:  # frozen since the forward
            continue
        total = parameter.grad
        if total is None:
            parameter.grad = gradient
        else:
            totals.append(total)
            terms.append(gradient)
    if totals:
        torch._foreach_add_(totals, terms)
