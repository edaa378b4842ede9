"""One call of an op for properties.py and fuzz.py: the tested run and the expected ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttfm.bench.peers import Inputs
from fasttfm.ops.core.backends import tables, triton_interpreted
from fasttfm.testing.harness import (
    SEED,
    Run,
    comparisons_of,
    draw_inputs,
    floating_of,
    incoming_gradients,
    run,
    with_backend,
)
from fasttfm.testing.spec import OpCase, OpSpec, outputs_of


@dataclass(frozen=True)
class Call:
    """An op's case in one dtype on one backend, or computed by ``function`` instead of the op."""

    spec: OpSpec
    case: OpCase
    dtype: torch.dtype
    backend: str | None
    device: str = "cpu"
    function: Callable[..., Any] | None = None

    def inputs(self, seed: int = SEED) -> Inputs:
        return draw_inputs(self.spec, self.case, self.dtype, self.device, seed)

    def op(self) -> Callable[..., Any]:
        return self.function or with_backend(self.spec, self.backend)

    def tested(self, inputs: Inputs, **how: Any) -> Run:
        return run(self.spec, self.op(), inputs, self.case.options, **how)

    def naive(self, inputs: Inputs, **how: Any) -> Run:
        return run(self.spec, self.spec.reference, inputs, self.case.options, **how)

    def exact(self, inputs: Inputs, **how: Any) -> Run:
        return self.naive(inputs, wide=True, **how)

    def terms(self, inputs: Inputs, incoming: Sequence[Tensor | None], **how: Any) -> Run:
        """The magnitudes of the terms whose differences are the gradients (``OpSpec.terms``)."""
        assert self.spec.terms is not None
        positive = {**inputs, **{name: inputs[name].abs() for name in floating_inputs(inputs)}}
        gradients = [None if gradient is None else gradient.abs() for gradient in incoming]
        return run(self.spec, self.spec.terms, positive, self.case.options, wide=True, incoming=gradients, **how)

    def incoming(self, inputs: Inputs, seed: int = SEED) -> list[Tensor]:
        """A gradient for each floating output."""
        with torch.no_grad():
            outputs = outputs_of(self.op()(**inputs, **self.case.options))
        return incoming_gradients(floating_of(outputs), inputs, seed=seed)

    def check(self, what: str, inputs: Inputs, **how: Any) -> None:
        """Checks that the tested run is as accurate as plain torch's."""
        hold(what, self.tested(inputs, **how), self.naive(inputs, **how), self.exact(inputs, **how))


def hold(what: str, tested: Run, naive: Run, exact: Run) -> None:
    wrong = [str(comparison) for comparison in comparisons_of(tested, naive, exact) if not comparison.ok]
    assert not wrong, f"{what}: {'; '.join(wrong)}"


def floating_inputs(inputs: Inputs) -> list[str]:
    return [name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()]


def backends_on(spec: OpSpec, device: str) -> list[str]:
    """The op's backends that support this device on this machine; Triton supports CPU tensors in its interpreter."""
    other = ["cuda", *([] if triton_interpreted() else ["triton"])] if device == "cpu" else ["cpu"]
    present = [backend.name for backend in tables()[spec.name].backends if backend.absent() is None]
    return [name for name in present if name not in other]
