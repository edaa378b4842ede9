"""FP8: rounding, both layouts, activations, scales and GEMMs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm.kernels.common import philox
from fasttfm.kernels.common.activation import activate, derivative
from fasttfm.kernels.fp8 import reference
from fasttfm.ops import fp8
from fasttfm.ops.fp8 import E4M3, E5M2, Scales, Slot
from fasttfm.ops.fp8 import native as fp8_native

FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
SHAPES = [(1, 16), (16, 64), (37, 48), (200, 80), (130, 144)]
INFINITE, NAN = math.inf, math.nan
BACKENDS = [pytest.param("reference", "cpu"), pytest.param("cuda", "cuda", marks=pytest.mark.gpu)]
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def grid(dtype: torch.dtype) -> Tensor:
    """Every finite number of a format, in order."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return numbers[numbers.isfinite()].unique()


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of a format's numbers at ``x``."""
    mantissa, least = {E4M3: (3, -6), E5M2: (2, -14)}[dtype]
    exponent = torch.frexp(x.double()).exponent - 1
    return torch.exp2(exponent.clamp(min=least).double() - mantissa)


def on_grid(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Normal numbers of a format times 4, which are exact with a scale of 1/4."""
    mantissa, _ = {E4M3: (3, -6), E5M2: (2, -14)}[dtype]
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(2**mantissa, 2 ** (mantissa + 1), shape, generator=generator)
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    return (sign * whole * torch.exp2(torch.randint(-4, 4, shape, generator=generator))).float().to(device) * 4


def one(value: float, device: str = "cpu") -> Tensor:
    return torch.tensor(value, device=device)


def run(backend: str, name: str, *arguments: Any) -> Any:
    (chosen,) = [each for each in fp8.TABLE.backends if each.name == backend]
    return chosen.forward(name, *arguments)


def cast(backend: str, x: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """Rows, columns and the largest magnitude; the outputs are filled with NaN before the call."""
    shapes = (x.shape, (x.shape[1], reference.padded(len(x))))
    rows, columns = (torch.full(shape, NAN, device=x.device).to(dtype) for shape in shapes)
    amax = one(0.0, str(x.device))
    run(backend, "cast", x, one(scale, str(x.device)), amax, rows, columns)
    return rows, columns, amax.item()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """The same bits, except that a NaN may have another sign."""
    bits, others = a.view(torch.uint8).clone(), b.view(torch.uint8).clone()
    bits[a.float().isnan()] = others[b.float().isnan()] = 0x7F
    return torch.equal(bits, others)


# ---- rounding --------------------------------------------------------------------------------------------------------


@FORMATS
def test_a_cast_is_the_nearest_number(dtype: torch.dtype) -> None:
    numbers = grid(dtype)
    between = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, between, between * 1.001, torch.randn(2000).double() * 30]).float()
    found = reference.quantize(x, one(1.0), dtype).double()
    nearest = (x.double()[:, None].clamp(numbers[0], numbers[-1]) - numbers).abs().amin(1)
    assert torch.equal((found - x.double().clamp(numbers[0], numbers[-1])).abs(), nearest)


@FORMATS
def test_finite_values_saturate_and_others_become_nan(dtype: torch.dtype) -> None:
    x = torch.tensor([1e30, -1e30, INFINITE, -INFINITE, NAN])
    found = reference.quantize(x, one(2.0), dtype).float()
    assert found[:2].tolist() == [reference.LIMITS[dtype], -reference.LIMITS[dtype]]
    assert found[2:].isnan().all()


def test_the_largest_magnitude_leaves_nan_out() -> None:
    amax = one(1.0)
    reference.record_amax(amax, torch.tensor([0.5, NAN, -3.0]))
    assert amax.item() == 3.0
    reference.record_amax(amax, torch.tensor([2.0, NAN]))
    assert amax.item() == 3.0
    reference.record_amax(amax, torch.tensor([-INFINITE]))
    assert amax.item() == INFINITE


@FORMATS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_both_layouts(backend: str, device: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = on_grid(shape, dtype, device)
    x = x.bfloat16() if device == "cuda" else x  # no more bits are needed
    rows, columns, amax = cast(backend, x, 0.25, dtype)
    assert torch.equal(rows.float() * 4, x.float())
    assert torch.equal(columns.float()[:, : len(x)], rows.float().t())
    assert (columns.float()[:, len(x) :] == 0).all()
    assert amax == x.abs().max().item()


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("element", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_a_gpu_rounds_as_the_reference(strided: bool, element: torch.dtype, dtype: torch.dtype) -> None:
    x = (torch.randn(333, 272, device="cuda") * torch.logspace(-8, 3, 272, device="cuda")).to(element)
    x = x[:, 64:144] if strided else x
    x[3, 5], x[4, 6], x[5, 7] = NAN, INFINITE, 1e30
    for found, expected in zip(cast("cuda", x, 16.0, dtype), cast("reference", x, 16.0, dtype), strict=True):
        assert found == expected if isinstance(found, float) else same_bits(found, expected)


# ---- activations -----------------------------------------------------------------------------------------------------


def drawn(shape: tuple[int, int], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """h, da and the bias."""
    generator, dtype = torch.Generator().manual_seed(1), torch.bfloat16 if device == "cuda" else torch.float32
    h, da, bias = (torch.randn(each, generator=generator).to(device) for each in (shape, shape, shape[1:]))
    return h.to(dtype), da.to(dtype), bias


def check_rounded(q: Tensor, exact: Tensor) -> None:
    """The nearest number, or the other neighbour if the error of the unrounded number allows it."""
    own = 1e-6 * exact.abs().max()
    assert (((q.double() - exact).abs() - own) / spacing(exact, q.dtype)).max() <= 0.5 + 1e-4


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_the_activation_forward(backend: str, device: str, kind: str) -> None:
    h, _, bias = drawn((37, 48), device)
    exact = activate(h.double() + bias.double(), kind) * 8
    amax = one(0.0, device)
    rows = run(backend, "gelu_forward", h, bias, kind, one(8.0, device), amax, E4M3)
    check_rounded(rows, exact)
    torch.testing.assert_close(amax.double() * 8, exact.abs().max(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_the_activation_backward(has_bias: bool, backend: str, device: str) -> None:
    h, da, bias = drawn((75, 48), device)
    given = bias if has_bias else None
    u = h.double() + (bias.double() if has_bias else 0)
    dh, a = da.double() * derivative(u, "gelu") * 8, activate(u, "gelu") * 4
    amax = one(0.0, device)
    scales = (one(4.0, device), E4M3, one(8.0, device), amax, E5M2)
    rows, columns, again, dbias = run(backend, "gelu_backward", da, h, given, "gelu", *scales, True)
    check_rounded(rows, dh)
    check_rounded(again[:, :75].t(), a)
    assert torch.equal(columns.float()[:, :75], rows.float().t())
    assert columns.shape == again.shape == (48, 80)
    assert not columns.float()[:, 75:].any()
    assert not again.float()[:, 75:].any()
    torch.testing.assert_close(amax.double() * 8, dh.abs().max(), rtol=1e-5, atol=0)
    if has_bias:
        torch.testing.assert_close(dbias.double(), dh.sum(0) / 8, rtol=1e-5, atol=1e-4)
    else:
        assert dbias.numel() == 0


# ---- the activation in a GEMM's epilogue -----------------------------------------------------------------------------


def quantized(shape: tuple[int, int], seed: int, device: str) -> tuple[fp8.Quantized, Slot]:
    generator = torch.Generator().manual_seed(seed)
    (slot,) = Scales([E4M3], 2, torch.device(device)).slots
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return fp8.cast(torch.randn(shape, generator=generator).to(device).to(dtype), slot), slot


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("sizes", [(1, 16, 16), (300, 144, 208), (1000, 768, 3072), (257, 4096, 400)], ids=str)
def test_the_epilogue_has_the_bits_of_the_activations_pass(
    sizes: tuple[int, int, int], has_bias: bool, kind: str
) -> None:
    rows, inputs, columns = sizes
    (x8, _), (w8, w_slot) = quantized((rows, inputs), 0, "cuda"), quantized((columns, inputs), 1, "cuda")
    bias = torch.randn(columns, device="cuda") if has_bias else None
    slot, other = Scales([E4M3] * 2, 2, torch.device("cuda")).slots
    slot.scales.set_magnitudes(float(inputs) ** 0.5)  # some values saturate
    weight = fp8.Fp8Weight(w8.rows, (slot, w_slot))
    weight.rows = w8.rows
    assert fp8_native.refuse_gelu_gemm(x8.rows, torch.bfloat16) is None
    h, a8 = weight.forward_gelu(x8, torch.bfloat16, bias, kind, slot, keep_h=True)
    nothing, again = weight.forward_gelu(x8, torch.bfloat16, bias, kind, slot, keep_h=False)
    assert h is not None
    assert nothing is None
    expected = fp8.gelu(h, bias, kind, other)
    assert same_bits(a8.rows, expected.rows)
    assert same_bits(again.rows, expected.rows)
    assert slot.amax.item() == other.amax.item() > 0

    exact = (x8.rows.double() @ w8.rows.double().t()) * (x8.inverse.double() * w8.inverse.double())
    library = weight.forward(x8, torch.bfloat16)
    floor = 2.0**-8 * exact.abs().max()
    assert (h.double() - exact).abs().max() <= 2 * (library.double() - exact).abs().max() + floor


def integers(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float().cuda().to(dtype)


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "silu"])
@pytest.mark.parametrize("sizes", [(1, 16, 16), (100, 80, 208), (129, 256, 48), (1000, 768, 3072)], ids=str)
def test_the_backwards_epilogue_has_the_bits_of_the_activations_pass(
    sizes: tuple[int, int, int], kind: str, dtype: torch.dtype
) -> None:
    """The sums of products of these operands are exact. Zeros, infinities and NaN are among the results."""
    rows, inputs, columns = sizes
    dy, weight = integers((rows, inputs), dtype, 0), integers((columns, inputs), E4M3, 1)
    h, _, drawn_bias = drawn((rows, columns), "cuda")
    h[rows // 2, :3] = torch.tensor([INFINITE, -INFINITE, NAN])
    operands = (dy, one(2.0**-6, "cuda")), (weight, one(2.0**-5, "cuda"))
    a_scale, scale = one(64.0, "cuda"), one(2.0**16, "cuda")
    da = fp8.gemm(*operands, torch.bfloat16, fast=False)
    for bias in (None, drawn_bias, drawn_bias.bfloat16()):
        amax, other = one(0.0, "cuda"), one(0.0, "cuda")
        expected = run("cuda", "gelu_backward", da, h, bias, kind, a_scale, E4M3, scale, amax, dtype, True)
        for _ in range(2):
            found = fp8_native.gelu_gemm_backward(*operands, h, bias, kind, a_scale, scale, other, want_dbias=True)
            assert all(same_bits(each, wanted) for each, wanted in zip(found[:3], expected[:3], strict=True))
            assert other.item() == amax.item()
        tolerance = 2.0**-7 if bias is not None and bias.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found[3], expected[3], rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_the_epilogues_operands_have_their_scales(device: str) -> None:
    (x8, _), (w8, w_slot) = quantized((20, 32), 0, device), quantized((48, 32), 1, device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    (slot,) = Scales([E4M3], 2, torch.device(device)).slots
    slot.scales.set_magnitudes(16.0)
    weight = fp8.Fp8Weight(w8.rows, (slot, w_slot))
    weight.rows = w8.rows
    h, a8 = weight.forward_gelu(x8, dtype, None, "relu", slot, keep_h=True)
    assert h is not None
    exact = (x8.rows.double() * x8.inverse.double()) @ (w8.rows.double() * w8.inverse.double()).t()
    torch.testing.assert_close(h.double(), exact, rtol=2.0**-7, atol=0.05)
    torch.testing.assert_close(a8.rows.double() * a8.inverse.double(), h.double().relu(), rtol=2.0**-4, atol=1e-3)


# ---- scales ----------------------------------------------------------------------------------------------------------


def test_scales_are_powers_of_two_that_use_the_range() -> None:
    scales = Scales([E4M3, E5M2, E4M3], 2, torch.device("cpu"))
    scales.amax.copy_(torch.tensor([3.0, 1e-6, 448.0]))
    scales.update()
    assert scales.scale.tolist() == [128.0, 2.0**35, 1.0]  # 448 / 3 = 149; 57344 / 1e-6 = 5.7e10
    assert torch.equal(scales.scale * scales.inverse, torch.ones(3))
    assert not scales.amax.any()


def test_scales_are_aligned_as_gemms_read_them() -> None:
    assert all(slot.inverse.data_ptr() % 16 == 0 for slot in Scales([E4M3] * 5, 2, torch.device("cpu")).slots)


def test_a_scale_follows_from_the_last_steps() -> None:
    scales = Scales([E4M3], 2, torch.device("cpu"))
    for amax, expected in ((1.0, 256.0), (100.0, 4.0), (1.0, 4.0), (1.0, 256.0)):
        scales.amax.fill_(amax)
        scales.update()
        assert scales.scale.tolist() == [expected]


def test_amax_of_zero_or_infinity_keeps_the_scale() -> None:
    scales = Scales([E4M3], 1, torch.device("cpu"))
    for amax in (1.0, INFINITE, NAN, 0.0):
        scales.amax.fill_(amax)
        scales.update()
        assert scales.scale.tolist() == [256.0]


@pytest.mark.parametrize("amax", [1e-44, 3e38])
def test_extreme_magnitudes_have_finite_scales(amax: float) -> None:
    scales = Scales([E5M2], 1, torch.device("cpu"))
    scales.amax.fill_(amax)
    scales.update()
    assert 0 < scales.scale.item() < INFINITE
    assert 0 < scales.inverse.item() < INFINITE


def test_state_is_restored() -> None:
    scales, other = (Scales([E4M3, E5M2], 3, torch.device("cpu")) for _ in range(2))
    scales.amax.copy_(torch.tensor([3.0, 5.0]))
    scales.update()
    scales.amax.fill_(0.5)
    other.load_state_dict(scales.state_dict())
    for each in (scales, other):
        each.update()
    assert torch.equal(scales.scale, other.scale)
    assert torch.equal(scales.history, other.history)
    with pytest.raises(ValueError, match=r"fp8: amax: expected the state of the same model, shape \(1,\)"):
        Scales([E4M3], 3, torch.device("cpu")).load_state_dict(scales.state_dict())


# ---- GEMMs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_the_three_products_of_a_linear_layer(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, dy, bias = (
        torch.randn(shape, generator=generator).to(device) for shape in ((37, 32), (48, 32), (37, 48), (48,))
    )
    layer = fp8.Fp8Linear(weight, tuple(Scales([E4M3, E4M3, E5M2], 4, weight.device).slots))  # type: ignore[arg-type]
    layer.refresh_changed()
    x8, g8 = fp8.cast(x, layer.input), fp8.cast(dy, layer.gradient)
    rounded = [
        reference.quantize(each, slot.scale, slot.dtype).double() * slot.inverse.double()
        for each, slot in ((x, layer.input), (weight, layer.weight), (dy, layer.gradient))
    ]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    found = [
        layer.forward(x8, dtype, bias.to(dtype)),
        layer.input_gradient(g8, dtype),
        layer.weight_gradient(g8, (x8.columns, x8.inverse), torch.float32),
        layer.add_input_gradient(torch.ones(37, 32, dtype=dtype, device=device), g8),
    ]
    exact = [
        rounded[0] @ rounded[1].t() + bias.to(dtype).double(),
        rounded[2] @ rounded[1],
        rounded[2].t() @ rounded[0],
        rounded[2] @ rounded[1] + 1,
    ]
    for result, expected in zip(found, exact, strict=True):
        # bf16 results have 8 bits; Hopper's partial sums in FP8 about 14 (docs/numerics.md).
        bits = 8 if result.dtype == torch.bfloat16 else 13 if device == "cuda" else 20
        assert (result.double() - expected).abs().max() <= 2.0**-bits * expected.abs().max() * 2


@pytest.mark.gpu
def test_many_weights_are_cast_by_one_launch() -> None:
    """Of several sizes, also of partial tiles."""
    if fp8_native.refuse(torch.zeros(16, 16, device="cuda")) is not None:
        pytest.skip("needs Hopper's kernels")
    sizes = [(16, 16), (256, 128), (144, 400), (128, 1024), (48, 64)]
    weights = [torch.randn(size, device="cuda") for size in sizes]
    scales = Scales([E4M3, E4M3, E5M2] * len(sizes), 4, torch.device("cuda", 0))
    scales.update()
    slots = iter(scales.slots)
    layers = [fp8.Fp8Linear(each, (next(slots), next(slots), next(slots))) for each in weights]
    for layer in layers:
        layer.refresh_changed()
    expected = [(layer.rows.clone(), layer.columns.clone()) for layer in layers]
    amax = scales.amax.clone()
    for layer in layers:
        layer.rows.view(torch.uint8).fill_(0x7F)
        layer.columns.view(torch.uint8).fill_(0x7F)
    scales.amax.zero_()
    table = fp8.refresh_all(layers, None)
    assert fp8.refresh_all(layers, table) is table
    assert table is not None
    for layer, (rows, columns) in zip(layers, expected, strict=True):
        assert same_bits(layer.rows, rows)
        assert same_bits(layer.columns, columns)
    assert torch.equal(scales.amax, amax)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [16, 272, 1024])
def test_dropout_in_a_cast_is_that_of_the_backward(columns: int) -> None:
    """The mask is that of dropout_add_layer_norm, which rounds to bf16 before the cast."""
    if fp8_native.refuse(torch.zeros(16, 16, device="cuda")) is not None:
        pytest.skip("needs Hopper's kernels")
    ends = torch.tensor([0, 3, 3, 130, 131, 300, 333], dtype=torch.int32, device="cuda")
    seed = torch.tensor([12345678901234], device="cuda")
    x = torch.randn(333, columns, device="cuda").bfloat16() + 3
    sequences, tokens = philox.row_positions(x.shape, ends, x.device)
    kept = philox.kept(seed, sequences, tokens, columns, philox.threshold(0.1))
    expected = torch.where(kept, x.float() * philox.scale(philox.threshold(0.1)), 0.0)
    slot = Scales([E5M2], 1, x.device).slots[0]
    slot.scales.set_magnitudes(0.0)
    found = fp8.cast_dropped(x, slot, (ends, seed, 0.1))
    assert same_bits(found.rows, reference.quantize(expected, slot.scale, E5M2))
    assert torch.equal(found.columns.float()[:, :333], found.rows.float().t())
    assert slot.amax == expected.abs().max()
