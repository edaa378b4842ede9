"""fasttfm.nn.LayerNorm as a drop-in for torch.nn.LayerNorm."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import fasttfm
from fasttfm.testing import compare
from fasttfm.testing.alterations import alterations_of, check_altered
from fasttfm.testing.tolerance import GRADIENT_FACTOR, OUTPUT_FACTOR

SHAPES: list[tuple[Any, dict[str, Any]]] = [
    (24, {}),
    ((24,), {"eps": 1e-3}),
    ((4, 6), {}),
    ((2, 3, 4), {}),
    (24, {"bias": False}),
    ((4, 6), {"elementwise_affine": False}),
]


def pair(normalized_shape: Any, **options: Any) -> tuple[fasttfm.nn.LayerNorm, torch.nn.LayerNorm]:
    """Ours and torch's with the same random parameters."""
    torch.manual_seed(0)
    theirs = torch.nn.LayerNorm(normalized_shape, **options)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours = fasttfm.nn.LayerNorm(normalized_shape, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def run(module: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and every gradient, by name."""
    x = x.detach().requires_grad_()
    y = module(x)
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    names = ["x", *(name for name, _ in module.named_parameters())]
    gradients = torch.autograd.grad(y, [x, *module.parameters()], dy)
    return {"y": y.detach(), **{f"d{name}": value for name, value in zip(names, gradients, strict=True)}}


@pytest.mark.parametrize(("normalized_shape", "options"), SHAPES, ids=str)
def test_same_numbers_as_torch(normalized_shape: Any, options: dict[str, Any]) -> None:
    ours, theirs = pair(normalized_shape, **options)
    x = torch.randn(5, 7, *theirs.normalized_shape)
    results, naive = run(ours, x), run(theirs, x)
    exact = run(copy.deepcopy(theirs).double(), x.double())
    assert results.keys() == naive.keys()
    for name, value in results.items():
        factor = OUTPUT_FACTOR if name == "y" else GRADIENT_FACTOR
        comparison = compare(name, value, naive[name], exact[name], factor)
        assert comparison.ok, str(comparison)


@pytest.mark.parametrize(("normalized_shape", "options"), SHAPES, ids=str)
def test_same_state_dict_and_description(normalized_shape: Any, options: dict[str, Any]) -> None:
    ours, theirs = pair(normalized_shape, **options)
    assert {name: value.shape for name, value in ours.state_dict().items()} == {
        name: value.shape for name, value in theirs.state_dict().items()
    }
    theirs.load_state_dict(ours.state_dict())  # and back
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, torch.nn.LayerNorm)


def test_a_wrong_shape_raises_with_both() -> None:
    module = fasttfm.nn.LayerNorm((4, 6))
    with pytest.raises(ValueError, match=r"LayerNorm: input: expected shape .*\(4, 6\).*, got \(2, 6, 4\)"):
        module(torch.ones(2, 6, 4))
    with pytest.raises(ValueError, match="LayerNorm: input: expected shape"):
        module(torch.ones(6))


def test_autocast_keeps_the_type_of_the_activations() -> None:
    ours, _ = pair(24)
    x = torch.randn(5, 24).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ours(x)
    assert y.dtype == torch.bfloat16
    assert ours.weight.dtype == torch.float32
    assert torch.equal(y, ours(x))


def test_autocast_takes_the_output_of_a_linear_layer() -> None:
    ours, _ = pair(24)
    linear = torch.nn.Linear(8, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ours(linear(torch.randn(5, 8)))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert ours.weight.grad is not None
    assert ours.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_equal_and_independent(duplicate: Any) -> None:
    ours, _ = pair((4, 6))
    x = torch.randn(3, 4, 6)
    twin = duplicate(ours)
    assert type(twin) is fasttfm.nn.LayerNorm
    assert torch.equal(twin(x), ours(x))
    with torch.no_grad():
        twin.weight.zero_()
    assert not torch.equal(twin(x), ours(x))


def test_meta_device_gives_shapes_without_numbers() -> None:
    module = fasttfm.nn.LayerNorm(24, device="meta", dtype=torch.bfloat16)
    y = module(torch.empty(5, 24, device="meta", dtype=torch.bfloat16))
    assert (y.device.type, y.shape, y.dtype) == ("meta", (5, 24), torch.bfloat16)
    materialized = module.to_empty(device="cpu")
    materialized.reset_parameters()
    assert materialized(torch.randn(5, 24).bfloat16()).isfinite().all()


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    ours, _ = pair((4, 6))
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, 4, 6)
        assert torch.equal(compiled(x), ours(x))


ALTERATIONS = alterations_of(torch.nn.LayerNorm(24), ("",))


@pytest.mark.parametrize("name", ALTERATIONS)
def test_alterations_have_the_effect_that_they_have_in_torch(name: str) -> None:
    x = {"x": torch.randn(5, 24)}
    check_altered(*pair(24), lambda module, inputs: {"y": module(inputs["x"])}, x, ALTERATIONS[name])


def test_a_parametrized_weight() -> None:
    ours, theirs = pair(24)
    for module in (ours, theirs):
        torch.nn.utils.parametrize.register_parametrization(module, "weight", torch.nn.Tanh())
    check_altered(ours, theirs, lambda module, inputs: {"y": module(inputs["x"])}, {"x": torch.randn(5, 24)})
