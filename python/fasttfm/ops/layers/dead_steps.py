"""Leaves out what a backward computes for frozen parameters: their gradients, and the steps that only lead to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fasttfm.ops.layers import steps
from fasttfm.ops.layers.spec import FIELDS

_FIELDS = frozenset(FIELDS)


def without_dead_steps(backward: Sequence[Any], frozen: frozenset[str]) -> list[Any]:
    """The steps of a backward, without the gradients of the ``frozen`` FIELDS and inputs (``Situation``). A tensor
    that no step reads any more is not kept by the forward."""
    if not frozen:
        return list(backward)
    read: set[str] = set()  # by later steps
    remaining = []
    for step in reversed(backward):
        written = steps.written_by(step)
        if isinstance(step, steps.Range) or any(name in read or _is_result(name, frozen) for name in written):
            unused = [name for name in written if _is_parameter(name) and not _is_result(name, frozen)]
            remaining.append(_without(step, unused))
            read.update(steps.names_in(remaining[-1]))
    return remaining[::-1]


def _is_result(name: str, frozen: frozenset[str]) -> bool:
    """Whether a tensor is a gradient that is needed: of a parameter, or of an input of the layers."""
    if _is_parameter(name):
        return name.rpartition(".")[2] not in frozen
    return name.startswith("d lora ") or (name in ("dx", "dresidual") and name[1:] not in frozen)


def _is_parameter(name: str) -> bool:
    """Whether a tensor is the gradient of a parameter."""
    return name.startswith("d ") and name.rpartition(".")[2] in _FIELDS


def _without(step: Any, names: Sequence[str]) -> Any:
    """The step, which does not write these tensors."""
    if not names:
        return step
    return step._replace(**{field: None for field, value in zip(step._fields, step, strict=True) if value in names})
