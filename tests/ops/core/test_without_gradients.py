"""A call without gradients has the bits of one that records a graph, although it may compute less (Backend.infer)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fasttfm.ops.core.backends import BackendRefused, tables
from fasttfm.testing.call import Call
from fasttfm.testing.spec import OpCase, OpSpec, outputs_of
from fasttfm.testing.specs import every_spec


def calls() -> Iterator[Any]:
    for spec in every_spec():
        for backend in tables()[spec.name].backends:
            if backend.infer is not None:
                marks = [pytest.mark.gpu] if backend.name == "cuda" else []
                for case in spec.cases:
                    yield pytest.param(
                        spec, case, backend.name, marks=marks, id=f"{spec.name}-{backend.name}-{case.name}"
                    )


@pytest.mark.parametrize(("spec", "case", "backend"), list(calls()))
def test_the_same_bits(spec: OpSpec, case: OpCase, backend: str) -> None:
    device = "cuda" if backend == "cuda" else "cpu"
    refusals = 0
    for dtype in case.dtypes:
        call = Call(spec, case, dtype, backend, device)
        inputs, results = call.inputs(), []
        for grad in (False, True):
            given = {
                name: value.detach().requires_grad_(grad and name in spec.differentiable)
                if isinstance(value, torch.Tensor) and value.is_floating_point()
                else value
                for name, value in inputs.items()
            }
            try:
                with torch.set_grad_enabled(grad):
                    results.append([each.detach() for each in outputs_of(call.op()(**given, **case.options))])
            except BackendRefused:
                refusals += 1
                break
        if len(results) == 2:
            for without, recorded in zip(*results, strict=True):
                assert torch.equal(without.nan_to_num(7.0), recorded.nan_to_num(7.0))
    if refusals == len(case.dtypes):
        pytest.skip(f"{backend} does not support this case")
