"""Optimizer steps that torch's version counters see.

Copies of parameters (weight_copies.py, fp8.py) are out of date when a parameter's version counter has advanced. torch's
fused optimizers and those of some other libraries change parameters without advancing it. ``watch`` makes a step of any
optimizer advance the counters of the watched parameters, as a step of torch's other optimizers does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_post_hook

_watched: dict[int, weakref.ref[Tensor]] = {}  # by the parameter's id


def watch(parameters: Iterable[Tensor]) -> None:
    """Counts the steps over these parameters from now on. Inference tensors have no version counter."""
    _listen()
    for parameter in parameters:
        if not parameter.is_inference():
            key = id(parameter)
            _watched[key] = weakref.ref(parameter, functools.partial(_gone, key))


def _gone(key: int, held: weakref.ref[Tensor]) -> None:
    if _watched.get(key) is held:  # otherwise the id belongs to another parameter by now
        del _watched[key]


@functools.cache
def _listen() -> None:
    register_optimizer_step_post_hook(_count)


def _count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if getattr(optimizer, "counts_changes", False):  # its steps advance the counters themselves
        return
    for group in optimizer.param_groups:
        parameters: list[Tensor] = group["params"]
        increment_version([parameter for parameter in parameters if _is_watched(parameter)])


def _is_watched(parameter: Tensor) -> bool:
    reference = _watched.get(id(parameter))
    return reference is not None and reference() is parameter
