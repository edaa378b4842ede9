"""Boundaries of packed sequences that lie: raised or clamped on a CPU, and no memory outside of tensors on a GPU.

Under ``compute-sanitizer --tool memcheck``, with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1`` so that each tensor is an
allocation of its own, the same calls also show reads outside of tensors: ``make sanitize-gpu`` runs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fasttfm.ops import check_errors
from fasttfm.testing.seams.allocations import Guards, guarded
from fasttfm.testing.seams.entry import EntryPoint, Inputs, SeamError, check_close, check_same

Lie = Callable[[Tensor], Tensor]
_FAR = 2**20


def _set(index: int, value: Callable[[Tensor], int]) -> Lie:
    def change(bounds: Tensor) -> Tensor:
        changed = bounds.clone()
        changed[index] = value(bounds)
        return changed

    return change


def _falling(bounds: Tensor) -> Tensor:
    """The boundaries inside in descending order."""
    changed = bounds.clone()
    if len(bounds) > 3:
        changed[1:-1] = bounds[1:-1].flip(0)
    else:
        changed[1:] = bounds[1:].flip(0) - 1
        changed[0] = bounds[-1]
    return changed


LIES: dict[str, Lie] = {
    "starts below 0": _set(0, lambda bounds: -7),
    "starts far below 0": _set(0, lambda bounds: -_FAR),
    "starts late": _set(0, lambda bounds: 1),
    "ends after the tokens": _set(-1, lambda bounds: int(bounds[-1]) + 9),
    "ends far after the tokens": _set(-1, lambda bounds: _FAR),
    "ends early": _set(-1, lambda bounds: max(0, int(bounds[-1]) - 1)),
    "a boundary inside far after the tokens": _set(1, lambda bounds: _FAR),
    "a boundary inside below 0": _set(1, lambda bounds: -3),
    "falls": _falling,
    "of a larger batch": lambda bounds: bounds * 3,  # what a buffer held before
}
# The name of the boundaries of an op or a module, and of what bounds their lengths.
NAMES = ("cu_seqlens", "cu_seqlens_k", "query_cu_seqlens", "document_cu_seqlens")
BOUND = "max_seqlen"


def boundaries_of(inputs: Inputs) -> list[str]:
    """The inputs that hold boundaries."""
    return [name for name in NAMES if isinstance(inputs.get(name), Tensor) and len(inputs[name]) > 1]


def check_lying_boundaries(entry: EntryPoint, device: torch.device, lie: str) -> None:
    """A call with boundaries that lie. On a CPU it raises ValueError, or agrees with the reference, which clamps. On a
    GPU, where reading them would synchronize, the result is not defined, but no memory outside of tensors changes, and
    the next call is right."""
    inputs = entry.inputs(0, device)
    names = boundaries_of(inputs)
    if not names:
        raise ValueError(f"check_lying_boundaries: {entry} has no boundaries")
    subject = entry.make(device)
    expected = entry.expected(0, device)
    for name in names:
        changed = {**inputs, name: LIES[lie](inputs[name])}
        if torch.equal(changed[name], inputs[name]):
            continue
        _call_with(entry, subject, changed, device, f"{entry}: {name} {lie}")
        check_same(entry.call(subject, inputs), expected, f"{entry}: after {name} that {lie}")


def check_lying_bound(entry: EntryPoint, device: torch.device) -> None:
    """``max_seqlen`` that is too large changes nothing; one that is too small raises on a CPU, or agrees with the
    reference; on a GPU it writes nothing outside of tensors."""
    inputs = entry.inputs(0, device)
    if BOUND not in inputs:
        raise ValueError(f"check_lying_bound: {entry} has no {BOUND}")
    subject = entry.make(device)
    expected = entry.expected(0, device)
    larger = {**inputs, BOUND: 2 * inputs[BOUND] + 3}
    check_close(entry.call(subject, larger), expected, f"{entry}: {BOUND} too large")
    for small in {1, max(1, inputs[BOUND] - 1)}:
        _call_with(entry, subject, {**inputs, BOUND: small}, device, f"{entry}: {BOUND}={small}, too small")
        check_same(entry.call(subject, inputs), expected, f"{entry}: after {BOUND} that was too small")


def _call_with(entry: EntryPoint, subject: Any, inputs: Inputs, device: torch.device, what: str) -> None:
    guards = Guards()
    results = None
    try:
        with guards.around_allocations():
            results = entry.call(subject, guarded(guards, inputs))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except ValueError as error:
        if not str(error):
            raise SeamError(f"{what}: a ValueError without words") from error
    except Exception as error:
        raise SeamError(f"{what}: expected ValueError, got {type(error).__name__}: {error}") from error
    if device.type == "cuda":
        with contextlib.suppress(ValueError):  # positions that follow from the boundaries may be outside of a table
            check_errors()
    guards.check(what)
    if results is None or device.type == "cuda":
        return
    if entry.reference is None:
        raise SeamError(f"{what}: expected ValueError on a CPU, got a result")
    check_close(results, entry.reference(subject, inputs), what)
