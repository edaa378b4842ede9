"""int8 linear layers: the sums are exact, each row has its own range, and every instruction set gives the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fasttfm import _native, ops
from fasttfm.ops.int8_linear import PRODUCTS, int8_linear, pack_int8, supported_products

pytestmark = pytest.mark.skipif(_native.missing() is not None, reason=str(_native.missing()))
OUTLIERS = [None, (0, 1), (17, 63)]
SHAPES = [(1, 1, 1), (3, 64, 32), (33, 100, 70), (70, 384, 48), (130, 65, 257)]


def inputs(rows: int, inner: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + inner)
    sizes = torch.logspace(-3, 3, rows)[:, None]  # rows of very different scales
    x = sizes * torch.randn(rows, inner, generator=generator)
    return x, torch.randn(columns, inner, generator=generator), torch.randn(columns, generator=generator)


def exact(x: Tensor, weight: Tensor, bias: Tensor, outliers: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """The formula in fp64, with x rounded as in fp32, and the sum of the magnitudes of its terms."""
    if outliers is not None:
        others = [column for column in range(x.shape[1]) if column not in outliers]
        y, magnitudes = exact(x[:, others], weight[:, others], bias)
        first, second = (torch.outer(x[:, column].double(), weight[:, column].double()) for column in outliers)
        return y + first + second, magnitudes + first.abs() + second.abs()
    smallest = x.amin(1, keepdim=True).clamp(max=0)
    step = (x.amax(1, keepdim=True).clamp(min=0) - smallest) * torch.tensor(1 / 255)
    rounded = ((x - smallest) * (1 / step) - 128).round().double()
    scales = weight.abs().amax(1) / 127
    integers = (weight / scales[:, None]).round().double()
    products = rounded @ integers.T * step.double() * scales.double()
    middles = (smallest + 128 * step).double() * integers.sum(1) * scales.double()
    return products + middles + bias, products.abs() + middles.abs() + bias.abs()


@pytest.mark.parametrize("outliers", OUTLIERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_formula(shape: tuple[int, int, int], outliers: tuple[int, int] | None) -> None:
    x, weight, bias = inputs(*shape)
    if outliers is not None:
        if outliers[1] >= shape[1] - 1:
            pytest.skip("the weight has too few columns")
        x[:, outliers] *= 1000  # which would take all steps
    packed = pack_int8(weight, bias, outliers)
    expected, magnitudes = exact(x, weight, bias, outliers)
    found = {name: int8_linear(x, packed, products=name) for name in supported_products()}
    for name, y in found.items():
        bound = 4 * torch.finfo(torch.float32).eps * magnitudes  # of the roundings of scales, products and sums
        assert bool(((y.double() - expected).abs() <= bound).all()), name
        assert torch.equal(y, found["generic"]), name
    for activation in ("gelu", "gelu_tanh", "relu", "silu"):
        applied = ops.bias_gelu(found["generic"], activation=activation, backend="cpu")
        assert torch.equal(int8_linear(x, packed, activation=activation), applied), activation
    assert torch.equal(int8_linear(x.view(1, *x.shape), packed)[0], found["generic"])


def test_rows_without_negative_elements_use_all_steps() -> None:
    """As after a ReLU: their error is half of that of steps around 0."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.rand(64, 256, generator=generator), torch.randn(32, 256, generator=generator)
    packed = pack_int8(weight)
    rounded = (weight / packed.scales[:, None]).round() * packed.scales[:, None]
    symmetric = (x / (x.amax(1, keepdim=True) / 127)).round() * (x.amax(1, keepdim=True) / 127)
    errors = [(y - x @ rounded.T).square().mean().sqrt() for y in (int8_linear(x, packed), symmetric @ rounded.T)]
    assert errors[0] < 0.6 * errors[1]


def test_outliers_cost_no_steps() -> None:
    """Rows with two columns that are 100 times larger: their error is that of the other columns."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 384, generator=generator), torch.randn(48, 384, generator=generator)

    def error(x: Tensor, outliers: tuple[int, int] | None) -> float:
        y = x.double() @ weight.double().T
        return (int8_linear(x, pack_int8(weight, None, outliers)) - y).square().mean().sqrt().item()

    larger = x.clone()
    larger[:, [99, 383]] *= 100
    assert error(larger, (99, 383)) < 1.1 * error(x, None)
    assert error(larger, None) > 10 * error(x, None)


def test_sums_of_the_largest_products_are_exact() -> None:
    """With K = 2**17 a sum takes 31 bits. Instructions that saturate, or sum pairs in 16 bits, would be wrong."""
    signs = torch.tensor([[1.0], [-1.0]])
    x, weight = signs.expand(2, 1 << 17), signs.expand(2, 1 << 17)
    for name in supported_products():
        y = int8_linear(x, pack_int8(weight), products=name)
        assert torch.allclose(y, (1 << 17) * signs @ signs.T, rtol=4 * torch.finfo(torch.float32).eps, atol=0), name


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_does_not_depend_on_others(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = inputs(70, 96, 64)
    packed = pack_int8(weight, bias)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    together = int8_linear(x, packed)
    for row in (0, 31, 69):
        assert torch.equal(int8_linear(x[row : row + 1], packed)[0], together[row])


@pytest.mark.parametrize("outliers", [None, (0, 69), (5, 6)], ids=str)
@pytest.mark.parametrize("products", PRODUCTS)
def test_values_that_are_not_finite_affect_only_their_rows(products: str, outliers: tuple[int, int] | None) -> None:
    if products not in supported_products():
        pytest.skip(f"this CPU has no {products}")
    x, weight, bias = inputs(5, 70, 33)
    packed = pack_int8(weight, bias, outliers)
    expected = int8_linear(x, packed, products=products)
    x[1, 69], x[3, 0] = math.nan, math.inf
    x[4] = 0
    found = int8_linear(x, packed, products=products)
    assert found[[1, 3]].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])
    assert torch.equal(found[4], bias)


def test_wrong_inputs_are_refused() -> None:
    packed = pack_int8(torch.ones(4, 8))
    assert int8_linear(torch.ones(0, 8), packed).shape == (0, 4)
    with pytest.raises(
        ValueError, match=r"int8_linear: x: expected float32 \[\.\.\., 8\] on the CPU, got float32 \(2, 9\)"
    ):
        int8_linear(torch.ones(2, 9), packed)
    with pytest.raises(ValueError, match="got float64"):
        int8_linear(torch.ones(2, 8, dtype=torch.float64), packed)


def test_wrong_weights_and_names_are_refused() -> None:
    """A bias that is too short would be read past its end."""
    x, weight, bias = inputs(3, 64, 32)
    for given, message in (
        ((weight, bias[:3]), r"bias: expected shape \(32,\), got shape \(3,\)"),
        ((weight[0],), r"weight: expected shape \(N, K\), both from 1 on, got shape \(64,\)"),
        ((weight, bias, (3, 64)), r"outliers: expected two ascending columns below 64, got \(3, 64\)"),
        ((weight, bias, (3, 3)), r"outliers: expected two ascending columns below 64, got \(3, 3\)"),
        ((weight, bias, (3,)), r"outliers: expected two ascending columns below 64, got \(3,\)"),
        ((weight[:, :0],), r"weight: expected shape \(N, K\), both from 1 on, got shape \(32, 0\)"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_int8(*given)
    packed = pack_int8(weight, bias)
    with pytest.raises(ValueError, match=r"activation: expected None or one of gelu, .*, got 'softmax'"):
        int8_linear(x, packed, activation="softmax")
    with pytest.raises(ValueError, match=r"products: expected None or one of generic, words, vnni, amx, .*, got 'sve'"):
        int8_linear(x, packed, products="sve")
    with pytest.raises(ValueError, match=r"x: expected float32 \[..., 64\] on the CPU, got float32 \(\) on cpu"):
        int8_linear(torch.tensor(1.0), packed)
