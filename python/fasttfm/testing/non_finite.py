"""The propagation of NaN and infinities through an op.

An element of a result depends on an element of the inputs if the reference in fp64 changes when that input element
changes. With a NaN or an infinity as that input element:

- an element that depends on a NaN is non-finite wherever the reference's is; one that depends on an infinity is
  non-finite, or equals the reference for the infinity or for a huge number: silu(-inf) may be NaN, by
  x / (1 + exp(-x)), or 0;
- an element that does not depend on it keeps its value or has that of the reference, which may turn it into NaN
  (0 * NaN). An infinity may become a NaN on the way (0 * infinity): the reference with a NaN instead of the infinity is
  accepted as well.

The reference has two forms, autograd's and the hand-written backward, which may compute 0 * NaN in different places.
Gradients that are NaN in only one of the two are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs
from fasttfm.testing.call import Call, floating_inputs
from fasttfm.testing.harness import Run, run, with_backend
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR, compare

NON_FINITE = (float("nan"), float("inf"), -float("inf"))
HUGE = 1e30


@dataclass(frozen=True)
class Element:
    """One element of an input, or of the incoming gradient of an output."""

    owner: str | int
    element: int

    def put(self, value: float, inputs: Inputs, incoming: Sequence[Tensor]) -> tuple[Inputs, list[Tensor]]:
        """The inputs and incoming gradients with ``value`` at this element."""
        if isinstance(self.owner, str):
            return {**inputs, self.owner: _with_element(inputs[self.owner], self.element, value)}, list(incoming)
        changed = list(incoming)
        changed[self.owner] = _with_element(changed[self.owner], self.element, value)
        return inputs, changed

    def __str__(self) -> str:
        owner = self.owner if isinstance(self.owner, str) else f"the gradient of output {self.owner}"
        return f"element {self.element} of {owner}"


def elements(inputs: Inputs, incoming: Sequence[Tensor]) -> Iterator[Element]:
    """The middle element of each floating input and of each incoming gradient."""
    tensors: dict[str | int, Tensor] = {name: inputs[name] for name in floating_inputs(inputs)}
    tensors.update(enumerate(incoming))
    for owner, tensor in tensors.items():
        if tensor.numel() > 0:
            yield Element(owner, tensor.numel() // 2)


def _with_element(tensor: Tensor, element: int, value: float) -> Tensor:
    """A copy with the same strides and ``value`` at one element; a finite value is clamped to the dtype's range."""
    if math.isfinite(value):
        largest = torch.finfo(tensor.dtype).max
        value = min(max(value, -largest), largest)
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    index = torch.unravel_index(torch.tensor(element), tensor.shape)
    copy[tuple(int(i) for i in index)] = value
    return copy


def check_non_finite(call: Call) -> None:
    """Checks that a NaN or an infinity in any floating input or incoming gradient propagates as in the reference."""
    inputs = call.inputs()
    incoming = call.incoming(inputs)
    if not incoming:  # the outputs are integers
        return
    check_elements(
        call, inputs, incoming, ((element, values_for(call, element)) for element in elements(inputs, incoming))
    )


def values_for(call: Call, element: Element) -> tuple[float, ...]:
    """The values to insert: NaN, and also infinities into an input, unless they mark masked elements there."""
    nan_only = isinstance(element.owner, int) or element.owner in call.spec.infinity_masks
    return NON_FINITE[:1] if nan_only else NON_FINITE


def check_elements(
    call: Call, inputs: Inputs, incoming: Sequence[Tensor], chosen: Iterable[tuple[Element, Sequence[float]]]
) -> None:
    """Checks each element with each of its values."""
    unspoilt = _Unspoilt(*(function(inputs, incoming=incoming) for function in (call.tested, call.naive, call.exact)))
    for element, values in chosen:
        depends = _dependence(call, inputs, incoming, element, unspoilt.exact)
        for value in values:
            _check_value(call, (inputs, incoming), element, value, depends, unspoilt)


class _Unspoilt(NamedTuple):
    """The call with finite numbers: the tested run, and the reference in its dtype and in fp64."""

    tested: Run
    naive: Run
    exact: Run


def _dependence(
    call: Call, inputs: Inputs, incoming: Sequence[Tensor], element: Element, clean: Run
) -> dict[str, Tensor]:
    """For each output and gradient, by name: which elements depend on the element."""
    depends = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in clean.tensors().items()}
    for value in (1.25, HUGE, -HUGE):
        changed, changed_incoming = element.put(value, inputs, incoming)
        other = call.exact(changed, incoming=changed_incoming).tensors()
        for name, tensor in clean.tensors().items():
            depends[name] |= other[name] != tensor
    return depends


def _check_value(
    call: Call,
    arguments: tuple[Inputs, Sequence[Tensor]],
    element: Element,
    value: float,
    depends: dict[str, Tensor],
    unspoilt: _Unspoilt,
) -> None:
    what = f"{value} at {element}"
    inputs, incoming = element.put(value, *arguments)
    tested, naive = call.tested(inputs, incoming=incoming), call.naive(inputs, incoming=incoming)
    forms = [naive, _written_out(call, inputs, incoming)]
    limits, by_nan, rounded = [], [], [unspoilt[1:]]
    if not math.isnan(value):
        huge, huge_incoming = element.put(math.copysign(HUGE, value), *arguments)
        at_huge = call.naive(huge, incoming=huge_incoming), call.exact(huge, incoming=huge_incoming)
        limits = [naive, at_huge[1]]
        rounded.append(at_huge)
        nan, nan_incoming = element.put(math.nan, *arguments)  # an infinity may become a NaN (0 * infinity)
        by_nan = [call.naive(nan, incoming=nan_incoming), _written_out(call, nan, nan_incoming)]
    for name, tensor in tested.tensors().items():
        finite = _finite(name, forms)
        pairs = [(plain.tensors()[name], exact.tensors()[name]) for plain, exact in rounded]
        lost = depends[name] & tensor.isfinite()
        if math.isnan(value):
            lost &= ~finite.any(dim=0)
        for right in limits:
            lost &= ~_near(tensor, right.tensors()[name], pairs)
        assert not lost.any(), f"{what}: {name}: {int(lost.sum())} elements are finite that must not be"
        made = ~tensor.isfinite() & _finite(name, forms + by_nan).all(dim=0) & ~depends[name]
        assert not made.any(), f"{what}: {name}: {int(made.sum())} elements are not finite that must be"
        # The same bits as without the NaN are accepted without a tolerance: this does not check accuracy.
        keeps = ~depends[name] & tensor.isfinite() & (tensor != unspoilt.tested.tensors()[name])
        plain, exact = (run.tensors()[name] for run in unspoilt[1:])
        factor = OUTPUT_FACTOR if name in tested.outputs else GRADIENT_FACTOR
        moved = keeps & ((tensor.double() - exact).abs() > compare(name, plain, plain, exact, factor).bound)
        for form in forms:
            moved &= ~_near(tensor, form.tensors()[name], pairs)
        assert not moved.any(), f"{what}: {name}: {int(moved.sum())} elements have changed that must not"


def _written_out(call: Call, inputs: Inputs, incoming: Sequence[Tensor]) -> Run:
    return run(call.spec, with_backend(call.spec, "reference"), inputs, call.case.options, incoming=incoming)


def _finite(name: str, forms: Sequence[Run]) -> Tensor:
    """bool [forms, ...]: which elements of an output of the first form, or of a gradient of each, are finite."""
    used = forms if name in forms[0].gradients else forms[::2]
    return torch.stack([form.tensors()[name].isfinite() for form in used])


def _near(tensor: Tensor, limit: Tensor, rounded: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Which elements are as close to ``limit`` as those of plain torch are to the exact ones, in any of these runs."""
    bound = 0.0
    for plain, exact in rounded:
        finite = plain.isfinite() & exact.isfinite()
        plain, exact = plain[finite], exact[finite]
        bound = max(bound, compare("", plain, plain, exact, GRADIENT_FACTOR).bound)
    step = torch.finfo(tensor.dtype).eps * limit.abs()
    return (tensor.double() - limit).abs() <= bound + step
