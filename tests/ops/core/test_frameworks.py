"""Arrays of other frameworks in and out of every op, by DLPack (docs/frameworks.md)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fasttfm import ops
from fasttfm.testing.harness import draw_inputs, same_bits
from fasttfm.testing.spec import OpSpec, outputs_of
from fasttfm.testing.specs import all_specs

SPECS = all_specs()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_op_on_numpys_arrays(spec: OpSpec) -> None:
    case = spec.cases[0]
    inputs = draw_inputs(spec, case, torch.float32)
    arrays = {name: value.numpy() for name, value in inputs.items() if isinstance(value, Tensor)}
    before = {name: array.copy() for name, array in arrays.items()}
    given: dict[str, Any] = {name: torch.from_dlpack(array) for name, array in arrays.items()}
    assert all(given[name].data_ptr() == array.ctypes.data for name, array in arrays.items())
    found = outputs_of(spec.function(**{**inputs, **given}, **case.options))
    expected = outputs_of(spec.function(**inputs, **case.options))
    for one, other in zip(found, expected, strict=True):
        result = np.from_dlpack(one)
        assert result.ctypes.data == one.data_ptr()
        assert same_bits(torch.from_numpy(result), other)
    for name, array in arrays.items():
        if name not in ("key_cache", "value_cache"):  # decode_attention writes them
            np.testing.assert_array_equal(array, before[name])


def test_gradients_of_numpys_arrays() -> None:
    x, weight = np.ones((3, 8), np.float32), np.arange(8, dtype=np.float32)
    x[0] = weight
    leaf = torch.from_dlpack(x).requires_grad_()
    y = ops.layer_norm(leaf, torch.from_dlpack(weight))
    y.backward(torch.from_dlpack(np.eye(3, 8, dtype=np.float32)))
    plain = torch.tensor(x, requires_grad=True)
    torch.nn.functional.layer_norm(plain, (8,), torch.from_numpy(weight)).backward(torch.eye(3, 8))
    np.testing.assert_allclose(np.from_dlpack(leaf.grad), plain.grad.numpy(), rtol=1e-4, atol=1e-6)


def test_a_result_outlives_its_tensor() -> None:
    x = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
    y = ops.rms_norm(torch.from_dlpack(x))
    result, expected = np.from_dlpack(y), y.clone()
    del y
    torch.ones(64, 256).mul_(3)  # would overwrite the memory if it were free
    np.testing.assert_array_equal(result, expected.numpy())
