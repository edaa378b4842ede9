"""fasttfm.nn.RMSNorm as a drop-in for torch.nn.RMSNorm."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import fasttfm
from fasttfm.testing.alterations import alterations_of, check_altered
from fasttfm.testing.modules import check_modules

SHAPES: list[tuple[Any, dict[str, Any]]] = [
    (24, {}),
    ((24,), {"eps": 1e-3}),
    ((4, 6), {}),
    ((2, 3, 4), {"eps": 1e-6}),
]


def pair(normalized_shape: Any, **options: Any) -> tuple[fasttfm.nn.RMSNorm, torch.nn.RMSNorm]:
    """Ours and torch's with the same random parameters."""
    torch.manual_seed(0)
    theirs = torch.nn.RMSNorm(normalized_shape, **options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours = fasttfm.nn.RMSNorm(normalized_shape, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def call(module: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"y": module(inputs["x"])}


@pytest.mark.parametrize(("normalized_shape", "options"), SHAPES, ids=str)
def test_same_numbers_as_torch(normalized_shape: Any, options: dict[str, Any]) -> None:
    ours, theirs = pair(normalized_shape, **options)
    check_modules(ours, theirs, call, {"x": torch.randn(5, 7, *theirs.normalized_shape)})


def test_without_a_weight() -> None:
    ours, theirs = pair((4, 6), elementwise_affine=False)
    x = torch.randn(5, 4, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_default_eps_is_that_of_the_statistics_dtype(dtype: torch.dtype) -> None:
    """Rows so small that the result depends on eps."""
    ours, theirs = (module.to(dtype) for module in pair(24))
    x = (torch.randn(5, 24, dtype=torch.float64) * (1e-8 if dtype == torch.float64 else 1e-4)).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(("normalized_shape", "options"), SHAPES, ids=str)
def test_same_state_dict_and_description(normalized_shape: Any, options: dict[str, Any]) -> None:
    ours, theirs = pair(normalized_shape, **options)
    theirs.load_state_dict(ours.state_dict())  # and back
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, torch.nn.RMSNorm)


def test_a_wrong_shape_raises_with_both() -> None:
    module = fasttfm.nn.RMSNorm((4, 6))
    with pytest.raises(ValueError, match=r"RMSNorm: x: expected shape .*\(4, 6\).*, got \(2, 6, 4\)"):
        module(torch.ones(2, 6, 4))
    with pytest.raises(ValueError, match="RMSNorm: x: expected shape"):
        module(torch.ones(6))


def test_autocast_keeps_the_type_of_the_activations() -> None:
    ours, _ = pair(24)
    x = torch.randn(5, 24).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ours(x)
    assert y.dtype == torch.bfloat16
    assert ours.weight.dtype == torch.float32
    assert torch.equal(y, ours(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_equal(duplicate: Any) -> None:
    ours, _ = pair((4, 6))
    x = torch.randn(3, 4, 6)
    twin = duplicate(ours)
    assert type(twin) is fasttfm.nn.RMSNorm
    assert torch.equal(twin(x), ours(x))


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    ours, _ = pair((4, 6))
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, 4, 6)
        assert torch.equal(compiled(x), ours(x))


ALTERATIONS = alterations_of(torch.nn.RMSNorm(24), ("",))


@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_have_the_effect_that_they_have_in_torch(name: str) -> None:
    check_altered(*pair(24), call, {"x": torch.randn(5, 24)}, ALTERATIONS[name])
